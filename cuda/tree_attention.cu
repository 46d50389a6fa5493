// Attention of a forest over paged KV, bf16 on tensor cores: softmax(scale q k^T) v of each query, times sigmoid(gate).
// Definition: tree_attention in boleinfer/ops/attention.py. How blocks share the work: attention_block.cuh; words and parts:
// attention.cuh.
//
// grid: at least as many blocks as there may be pairs of a tile of Rows queries and a KV head. block: 128 threads (Rows =
// 16, 64) or 256 (128). A warp owns 16 queries (attention_warp.cuh); of Rows = 16 each of the four warps makes the scores of
// a quarter of a tile's slots and owns a quarter of the columns.
// shared: 2 bytes x (Rows + 64 Stages) Dh: q, and a ring of 64 slots of K or V a stage; 9,216 more with Rows = 16: scores.
// Read twice: the KV of a request, once for each of its tiles, from L2.
//
// sizes: Dh=32,64,128,256 Rows=16 Stages=3,6 Act=bf16 | Dh=32,64,128,256 Rows=64 Stages=2 Act=bf16
// sizes: Dh=32,64,128,256 Rows=128 Stages=4 Act=bf16
// spills: of Rows = 64 and 128 some 50 registers that change once a tile or less; 100 to 160 hold sums and scores
#include "attention_block.cuh"

constexpr int BLOCKS = Rows == 128 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tree_attention(
    const Act* __restrict__ q,               // [Rq, Hq, Dh] aligned 16
    const Act* __restrict__ k_pages,         // [Pages, P, Hkv, Dh] aligned 16
    const Act* __restrict__ v_pages,         // [Pages, P, Hkv, Dh] aligned 16
    const int* __restrict__ page_table,      // [B, M]
    const int* __restrict__ rows,            // [Rq] or null; rows of the forest, -1 for none
    const int* __restrict__ request,         // [R]
    const unsigned* __restrict__ ancestors,  // [R, 4]
    const int* __restrict__ chain,           // [B]
    const int* __restrict__ start,           // [B+1]
    const int* __restrict__ committed,       // [B]
    float* __restrict__ part_o,              // [Parts, Hq, Dh] aligned 16
    float* __restrict__ part_ml,             // [Parts, Hq, 2] aligned 16
    const Act* __restrict__ gate,            // [Rq, Hq, Dh] strides [Ldg, Dh, 1]
    int* __restrict__ arrived,               // [Counters] zeros
    Act* __restrict__ out,                   // [Rq, Hq, Dh] aligned 16
    int Hq,
    int Hkv,
    int P,
    int B,
    int M,
    int Rq,
    int Room,
    int Splits,
    int Ldg,
    int Waiting,  // blocks that may wait for others at once
    float scale)
{
  extern __shared__ uint4 arena[];
  const Trees forest = {rows, request, ancestors, chain, start, committed, B, Rq};
  attend({q, k_pages, v_pages, gate, page_table, forest, part_o, reinterpret_cast<float2*>(part_ml), arrived, out, Hq, Hkv,
               P, M, Room, Splits, Ldg, Waiting, scale},
              arena);  // which calls after_previous()
}
