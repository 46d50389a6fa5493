// Gated delta rule for every row of a forest: outputs o and factors u from a checkpoint and a ring that are only read.
// Definition: gdn and tree in boleinfer/ops/gdn.py. With G the log decay summed from the checkpoint along the root
// path, the ring a chain before every root, and `before` the ring and all strict ancestors of a row n:
//   u_n = beta_n (v_n - e^{G_n} S^T k_n - sum_{a in before} e^{G_n - G_a} (k_a . k_n) u_a)
//   o_n =               e^{G_n} S^T q_n + sum_{a in before, n} e^{G_n - G_a} (k_a . q_n) u_a
//
// A window is a whole tree, or CHUNK rows of a longer chain, taken one after another with the state in shared memory.
// Its columns are the ring (in the first window), filled up to a multiple of 16, then its rows, 16 at a time:
//   W = decays * scores of the 16 rows with all columns so far: eight columns a warp, then a barrier
//   X = e^G S^T x + W U of the columns before, u by substitution, o = X + W u: each warp its own columns of V
// Rows that are not in use count as keys of zero and are not written. A row depends on its request alone. A request
// with a single row takes another way, that of gdn_row.cuh. Forest, state and ring are read before the previous kernel is
// done (after_all_previous in common.cuh).
//
// grid: V / Vt, Hv, B. block: 4 * Vt threads; see gdn.cuh for who owns what.
// shared: 4 (K + Cols) Vt + 128 Pitch + 20 Cols + 2048 bytes, Pitch = Cols or Cols + 16, Cols = ring and rows, each in
// full sixteens: 72 KB at most. S is read once; keys are read again for every 16 rows, from L1 or L2.
//
// sizes: Act=bf16,float K=16 V=16 Vt=16 | Act=bf16,float K=128 V=128 Vt=16,32 | Act=bf16,float K=64 V=64 Vt=32
#include "gdn_row.cuh"

constexpr int MOST = CHUNK + TREE;  // columns

struct Window {
  float* S;             // [K, Vt]
  float* U;             // [Cols, Vt]
  float* W;             // [2, 16, Pitch]: of the queries, of the keys
  double* sum;          // [Cols] log decays; then G, as a float and the rest
  const Act** key;      // [Cols] null where there is none
  unsigned* ancestors;  // [TREE, TREE / 32]: ancestors and itself
  int* up;              // [Cols] column of the parent
  int Pitch;
  int ring, rows;    // ring entries, rows of the window
  int from;          // first column of the rows
  int first;         // first flat row

  __device__ Window(char* memory, int Cols) : Pitch(Cols % 32 ? Cols : Cols + 16) {
    S = reinterpret_cast<float*>(memory);
    U = S + K * Vt;
    W = U + Cols * Vt;
    sum = reinterpret_cast<double*>(W + 2 * BLOCK * Pitch);
    key = reinterpret_cast<const Act**>(sum + Cols);
    ancestors = reinterpret_cast<unsigned*>(key + Cols);
    up = reinterpret_cast<int*>(ancestors + TREE * (TREE / 32));
  }
  __device__ __forceinline__ int columns() const { return from + (rows + BLOCK - 1) / BLOCK * BLOCK; }
  __device__ __forceinline__ float2 G(int i) const { return reinterpret_cast<const float2*>(sum)[i]; }
};

__device__ __forceinline__ float fade(float2 later, float2 earlier) {
  return expf((later.x - earlier.x) + (later.y - earlier.y));
}

// The warp's columns of rows 0 .. many-1 of a matrix with rows `stride` apart; zeros from row `some` on.
__device__ __forceinline__ void fetch(float* tile, const float* from, long long stride, int some, int many,
                                      const Lane& me) {
  const int quarter = 4 * (threadIdx.x % 2);
  for (int i = threadIdx.x % WARP / 2; i < many; i += WARP / 2) {
    const float* src = from + (i < some ? i * stride : 0) + me.column + quarter;
    cp_async16(tile + at(i, me.column + quarter), src, i < some);
  }
  cp_async_commit();
}

// Keys, log decays, parents and ancestors of the rows of a window; nothing where a row is not in use.
__device__ __forceinline__ void gather_rows(const Window& w, const Act* k, const float* g, const int* parent,
                                            const int* request, const unsigned* ancestors, bool chain, int b, int h,
                                            int Hk, int Hv, int tree) {
  for (int n = threadIdx.x; n < w.columns() - w.from; n += THREADS) {
    const long long row = w.first + (n < w.rows ? n : 0);
    const int owner = request[row], above = parent[row];
    const float decay = g[row * Hv + h];
    auto bits = load<TREE / 32>(ancestors + row * (TREE / 32));
    const bool used = n < w.rows && owner == b;
    const int before = chain ? n - 1 : used && above >= 0 ? above - tree : -1;
    w.key[w.from + n] = used ? k + (row * Hk + h / (Hv / Hk)) * K : nullptr;
    w.sum[w.from + n] = used ? clamped(decay) : 0.0;
    w.up[w.from + n] = before >= 0 ? w.from + before : w.ring - 1;
#pragma unroll
    for (int word = 0; word < TREE / 32; word++) {
      const int inside = n - 32 * word;  // bits 0 .. inside of this word are on a path to n
      if (chain) bits.v[word] = inside < 0 ? 0 : inside < 31 ? (2u << inside) - 1 : ~0u;
      if (!used) bits.v[word] = 0;
    }
    store<TREE / 32>(w.ancestors + n * (TREE / 32), bits);
  }
}

// The same for the ring, a chain.
__device__ __forceinline__ void gather_ring(const Window& w, const Act* k, const float* g, int h, int Hk, int Hv) {
  for (int i = threadIdx.x; i < w.from; i += THREADS) {
    const bool used = i < w.ring;
    w.key[i] = used ? k + ((long long)i * Hk + h / (Hv / Hk)) * K : nullptr;
    w.sum[i] = used ? clamped(g[i * Hv + h]) : 0.0;
    w.up[i] = used ? i - 1 : -1;
  }
}

// The queries and keys of rows n0 .. n0+15.
__device__ __forceinline__ void read_rows(Rows<Act> (&x)[2], const Window& w, int n0, const Act* q, const Act* k,
                                          const Lane& me) {
  const Act* key[2] = {w.key[w.from + n0 + me.row], w.key[w.from + n0 + me.row + 8]};
  x[0].read(key[0] ? q + (key[0] - k) : nullptr, key[1] ? q + (key[1] - k) : nullptr, me);
  x[1].read(key[0], key[1], me);
}

// G of every column as a float and what it lacks.
__device__ __forceinline__ void sum_decays(const Window& w) {
  sum_paths<MOST>(w.sum, w.up, w.columns());
  for (int i = threadIdx.x; i < w.columns(); i += THREADS) {
    const double sum = w.sum[i];
    const float high = float(sum);
    reinterpret_cast<float2*>(w.sum)[i] = {high, float(sum - high)};
  }
  __syncthreads();
}

// W of rows n0 .. n0+15 with all columns up to their own; 0 where a column is not on the row's path.
__device__ __forceinline__ void weights(const Window& w, const Rows<Act> (&x)[2], int n0, const Lane& me) {
  for (int tile = me.warp; tile * COLUMNS < w.from + n0 + BLOCK; tile += WARPS) {
    const int column = tile * COLUMNS + 2 * me.quad;
    float d[2][4] = {};
    scores(d, x, w.key[tile * COLUMNS + me.row], w.key[column], w.key[column + 1], me);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int n = n0 + me.row + 8 * half;
      const unsigned bits = column < w.from ? 0 : w.ancestors[n * (TREE / 32) + (column - w.from) / 32];
      float value[2][2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int a = column + e - w.from;
        const bool seen = a < 0 ? column + e < w.ring : bits >> (a % 32) & 1;
        const float decay = seen ? fade(w.G(w.from + n), w.G(column + e)) : 0.0f;
        value[0][e] = seen ? d[0][2 * half + e] * decay : 0.0f;
        value[1][e] = seen && a != n ? d[1][2 * half + e] * decay : 0.0f;
      }
#pragma unroll
      for (int type = 0; type < 2; type++) {
        store_two(w.W + (BLOCK * type + me.row + 8 * half) * w.Pitch + column, value[type][0], value[type][1]);
      }
    }
  }
}

// u of 16 rows from beta (v - what is past): each row's u, once known, is taken out of the rows below it.
__device__ __forceinline__ void substitute(float (&u)[4], const Window& w, int n0, const float (&beta)[2],
                                           const Lane& me) {
  if (n0 + 1 >= w.rows) return;
  float A[2][BLOCK];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const auto row = load<BLOCK>(w.W + (BLOCK + me.row + 8 * half) * w.Pitch + w.from + n0);
#pragma unroll
    for (int a = 0; a < BLOCK; a++) A[half][a] = beta[half] * row.v[a];
  }
#pragma unroll
  for (int a = 0; a < BLOCK - 1; a++) {
    if (n0 + a + 1 < w.rows) {
      const int lane = a % 8 * 4 + me.quad;
      const float x = __shfl_sync(ALL_LANES, u[a / 8 * 2], lane), y = __shfl_sync(ALL_LANES, u[a / 8 * 2 + 1], lane);
#pragma unroll
      for (int half = a / 8; half < 2; half++) {
        u[2 * half] = fmaf(-A[half][a], x, u[2 * half]);
        u[2 * half + 1] = fmaf(-A[half][a], y, u[2 * half + 1]);
      }
    }
  }
}

// The state after the window: e^{G_last} S + sum e^{G_last - G_i} k_i u_i^T. Each warp its own columns.
__device__ __forceinline__ void advance_state(const Window& w, const Lane& me) {
  const float2 last = w.G(w.from + w.rows - 1);
  const int quarter = me.column + 4 * (threadIdx.x % 2);
  for (int i = threadIdx.x % WARP / 2; i < w.columns(); i += WARP / 2) {
    auto u = load<4>(w.U + at(i, quarter));
    const float kept = w.key[i] ? fade(last, w.G(i)) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) u.v[j] *= kept;
    store<4>(w.U + at(i, quarter), u);
  }
  __syncwarp();
  State state;
  const float kept = expf(last.x + last.y);
#pragma unroll
  for (int j = 0; j < SHARE; j++) {
    const float2 s = load_two(w.S + at(SHARE * me.row + j, me.pair));
    state[j / 2][j % 2 * 2] = kept * s.x;
    state[j / 2][j % 2 * 2 + 1] = kept * s.y;
  }
  absorb(state, w.key, w.U, w.columns(), me);
#pragma unroll
  for (int j = 0; j < SHARE; j++) {
    store_two(w.S + at(SHARE * me.row + j, me.pair), state[j / 2][j % 2 * 2], state[j / 2][j % 2 * 2 + 1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, (TENSOR ? 512 : 384) / THREADS) gdn(
    const Act* __restrict__ q,               // [R, Hk, K] aligned 16
    const Act* __restrict__ k,               // [R, Hk, K] aligned 16
    const Act* __restrict__ v,               // [R, Hv, V] aligned 16
    const float* __restrict__ g,             // [R, Hv]
    const float* __restrict__ beta,          // [R, Hv]
    const float* __restrict__ S,             // [Slots, Hv, K, V] aligned 16
    const Act* __restrict__ ring_k,          // [Slots, C, Hk, K] aligned 16
    const float* __restrict__ ring_u,        // [Slots, C, Hv, V] aligned 16
    const float* __restrict__ ring_g,        // [Slots, C, Hv]
    const int* __restrict__ length,          // [Slots]
    const int* __restrict__ slot,            // [B]
    const int* __restrict__ start,           // [B+1]
    const int* __restrict__ chain,           // [B]
    const int* __restrict__ parent,          // [R]
    const int* __restrict__ request,         // [R]
    const unsigned* __restrict__ ancestors,  // [R, 4] aligned 16
    Act* __restrict__ o,                     // [R, Hv, V] aligned 16
    float* __restrict__ u,                   // [R, Hv, V] aligned 16
    int Hk,
    int Hv,
    int C,
    int Cols)  // columns that the shared memory holds
{
  extern __shared__ __align__(16) char memory[];
  const int b = blockIdx.z, h = blockIdx.y, v0 = blockIdx.x * Vt;
  const int tree = start[b], rows = start[b + 1] - tree, path = chain[b];
  const long long s = max(slot[b], 0);
  if (rows <= 0) {
    if (blockIdx.x + h + b == 0) after_previous();  // one has to
    return;
  }
  if (rows == 1) {
    const long long key = ((long long)tree * Hk + h / (Hv / Hk)) * K, value = (long long)tree * Hv + h;
    const Row row = {q + key, k + key, v + value * V + v0, g + value, beta + value, S + (s * Hv + h) * K * V + v0,
                     ring_k + (s * C * Hk + h / (Hv / Hk)) * K, ring_u + (s * C * Hv + h) * V + v0,
                     ring_g + s * C * Hv + h, length[s], request[tree] == b, o + value * V + v0, u + value * V + v0};
    return one_row(row, reinterpret_cast<float*>(memory), Hk, Hv);
  }
  const Lane me = this_lane();
  Window w(memory, Cols);
  fetch(w.S, S + (s * Hv + h) * K * V + v0, V, K, K, me);

  const int most = path ? CHUNK : rows;
  w.ring = length[s];
  w.from = (w.ring + BLOCK - 1) / BLOCK * BLOCK;
  fetch(w.U, ring_u + (s * C * Hv + h) * V + v0, (long long)Hv * V, w.ring, w.from, me);
  gather_ring(w, ring_k + s * C * Hk * K, ring_g + s * C * Hv, h, Hk, Hv);
  after_previous();
  for (int done = 0; done < rows; done += most) {
    if (done) {
      advance_state(w, me);
      __syncthreads();
      w.ring = w.from = 0;
    }
    w.first = tree + done;
    w.rows = min(most, rows - done);
    gather_rows(w, k, g, parent, request, ancestors, path, b, h, Hk, Hv, tree);
    __syncthreads();
    Rows<Act> x[2];
    read_rows(x, w, 0, q, k, me);
    sum_decays(w);

    for (int n0 = 0; n0 < w.rows; n0 += BLOCK) {
      if (n0) read_rows(x, w, n0, q, k, me);
      weights(w, x, n0, me);
      cp_async_wait<0>();
      __syncthreads();

      float X[2][4] = {}, strength[2], y[4];
      past(X, x, w.S, me);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float decay = expf(w.G(w.from + n0 + me.row + 8 * half).x);
#pragma unroll
        for (int c = 0; c < 2; c++) X[0][2 * half + c] *= decay, X[1][2 * half + c] *= decay;
      }
      weigh<2>(X, w.W, w.Pitch, w.U, 0, w.from + n0, me);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = n0 + me.row + 8 * half;
        const bool used = w.key[w.from + n];
        const long long at_row = (long long)(w.first + n) * Hv + h;
        const float2 value = used ? load_two(v + at_row * V + v0 + me.pair) : float2{0.0f, 0.0f};
        strength[half] = used ? beta[at_row] : 0.0f;
        y[2 * half] = strength[half] * (value.x - X[1][2 * half]);
        y[2 * half + 1] = strength[half] * (value.y - X[1][2 * half + 1]);
      }
      substitute(y, w, n0, strength, me);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        store_two(w.U + at(w.from + n0 + me.row + 8 * half, me.pair), y[2 * half], y[2 * half + 1]);
      }
      __syncwarp();
      weigh<1>(X, w.W, w.Pitch, w.U, w.from + n0, w.from + n0 + BLOCK, me);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = n0 + me.row + 8 * half;
        const long long to = ((long long)(w.first + n) * Hv + h) * V + v0 + me.pair;
        if (w.key[w.from + n]) {
          store_two(u + to, y[2 * half], y[2 * half + 1]);
          store_two(o + to, X[0][2 * half], X[0][2 * half + 1]);
        }
      }
      __syncthreads();  // W is free again
    }
  }
}
