// Philox4x32-10 (Salmon et al., SC11) and the number drawn for a token: the bits of boleinfer/sampling.py.
#pragma once

// Four random words of a counter and a key.
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const unsigned long long a = 0xD2511F53ull * counter.x, b = 0xCD9E8D57ull * counter.z;
    counter = uint4{unsigned(b >> 32) ^ counter.y ^ key.x, unsigned(b), unsigned(a >> 32) ^ counter.w ^ key.y, unsigned(a)};
    key = uint2{key.x + 0x9E3779B9u, key.y + 0xBB67AE85u};
  }
  return counter;
}

// The number in [0, 1), of 53 bits, for the token at an absolute position of the `choice`-th answer.
__device__ __forceinline__ double uniform(unsigned long long seed, unsigned choice, long long position) {
  const uint4 counter = {unsigned(position), unsigned((unsigned long long)position >> 32), choice, 0u};
  const uint4 word = philox(counter, uint2{unsigned(seed), unsigned(seed >> 32)});
  return (double(word.x >> 5) * 67108864.0 + double(word.y >> 6)) / 9007199254740992.0;  // 2^26, 2^53
}
