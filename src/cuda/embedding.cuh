#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"


// >>embedding

/* y (N,C) = table[ids], with table (V,C) and ids (N); n = N C. A thread copies W
   adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__embedding_fwd_kernel(stx__array y, stx__array table, const int32_t *ids, size_t n, size_t C) {
    STX__STEP(i, n, W) {
        size_t r = i / C;
        float v[W];
        stx__getn<W>(v, table, (size_t)ids[r] * C + (i - r * C));
        stx__putn<W>(y, i, v);
    }
}

void stx_embedding_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *table, const int32_t *ids,
                            size_t N, size_t C) {
    stx__array Y = stx__array_of(x, y), T = stx__array_of(x, table);
    const size_t n = N * C;
    const int four = C % 4 == 0 && stx__aligned4(Y) && stx__aligned4(T);
    if (n)
        STX__RUN_BY(x, "stx_embedding_fwd", four, stx__embedding_fwd_kernel, n, Y, T, ids, n, C);
}

/* Gradient of y[n] = table[ids[n]]: dtable[ids[n]] += dy[n]

   Ids can repeat, and two blocks must not add to the same row of dtable. Therefore the
   GPU first sorts the positions n by (id, position). Then each run, which is a sequence
   of equal ids, is summed in tiles of 32 sorted positions. If a run extends over
   several tiles, its partial sums are added in order. The order of additions depends on
   the ids alone. One id that occurs N times occupies as many blocks as N different ids.

   Sort, first stage: a block of 1024 threads sorts a chunk of 2048 keys with a bitonic
   network in shared memory. key = id 2^11 + index in the chunk. The last chunk is padded
   with the largest 64-bit integer. Writes the id and the index of each key; the id of
   padding is STX__NO_ID. */
enum { STX__SORT = 2048, STX__RANKED = 8, STX__ID_TILE = 32 };
  #define STX__NO_ID ((uint32_t)-1)

STX__GLOBAL(1024)
stx__embedding_sort_kernel(uint32_t *sorted, uint32_t *index, const int32_t *ids, size_t N) {
    STX__SHARED(uint64_t, k, STX__SORT);
    size_t base = (size_t)blockIdx.x * STX__SORT;
    for (unsigned i = threadIdx.x; i < STX__SORT; i += 1024)
        k[i] = base + i < N ? (uint64_t)(uint32_t)ids[base + i] * STX__SORT + i : ~(uint64_t)0;
    for (unsigned size = 2; size <= STX__SORT; size *= 2)
        for (unsigned gap = size / 2; gap; gap /= 2) {
            unsigned i = 2 * threadIdx.x - (threadIdx.x & (gap - 1)), j = i + gap;
            __syncthreads();
            uint64_t a = k[i], b = k[j];
            if ((a > b) == !(i & size)) {
                k[i] = b;
                k[j] = a;
            }
        }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < STX__SORT; i += 1024) {
        sorted[base + i] = (uint32_t)(k[i] / STX__SORT);
        index[base + i] = (uint32_t)(k[i] % STX__SORT);
    }
}

/* Sort, second stage: merges the chunks. The rank of an id is the number of ids before
   it, determined by a binary search in each chunk. Equal ids in earlier chunks precede
   the id, and equal ids in later chunks follow it. Writes the id and the position of
   each rank. A thread handles one id at a time. It searches STX__RANKED chunks at the
   same time, because each search is a chain of 12 dependent loads. The launch bound of
   one block per multiprocessor keeps all of these loads in flight: otherwise nvcc would
   save registers by waiting for each. */
STX__GLOBAL(256, 1)
stx__embedding_rank_kernel(int32_t *id, size_t *position, const uint32_t *sorted,
                           const uint32_t *index, size_t chunks) {
    STX__STEP(i, chunks * STX__SORT, 1) {
        const size_t mine = i / STX__SORT;
        const uint32_t me = sorted[i];
        const uint32_t *from = sorted;
        size_t rank = i % STX__SORT;
        if (me == STX__NO_ID) continue;
        for (size_t c = 0; chunks > 1 && c < chunks; c += STX__RANKED) {
            const int some = chunks - c < STX__RANKED ? (int)(chunks - c) : STX__RANKED;
            uint32_t v[STX__RANKED], limit[STX__RANKED]; /* ids below the limit are counted */
            uint32_t before[STX__RANKED];                /* index before the first id to test */
            int own = mine < c ? -1 : STX__RANKED; /* chunk `mine` is c + own */
            if (mine - c < STX__RANKED) own = (int)(mine - c);
#pragma unroll
            for (int j = 0; j < STX__RANKED; j++) {
                limit[j] = j < some && j != own ? me + (j < own) : 0;
                before[j] = j < some ? (uint32_t)j * STX__SORT - 1 : ~(uint32_t)0;
            }
#pragma unroll 1
            for (uint32_t step = STX__SORT / 2; step; step /= 2) {
#pragma unroll
                for (int j = 0; j < STX__RANKED; j++) v[j] = from[before[j] + step];
#pragma unroll
                for (int j = 0; j < STX__RANKED; j++) before[j] += v[j] < limit[j] ? step : 0;
            }
#pragma unroll
            for (int j = 0; j < STX__RANKED; j++) v[j] = from[++before[j]];
#pragma unroll
            for (int j = 0; j < STX__RANKED; j++)
                rank += before[j] % STX__SORT + (v[j] < limit[j]);
            from += STX__RANKED * STX__SORT;
        }
        id[rank] = (int32_t)me;
        position[rank] = mine * STX__SORT + index[i];
    }
}

/* Sums, first stage: block (tile, columns) adds the rows of each run in its tile in
   order. The sum of a run that is entirely inside the tile is added to dtable.
   Otherwise it is a partial sum and is stored in `part` (tiles,2,C): in part[tile][0]
   if the run is the first of the tile, else in part[tile][1]. A thread handles W
   adjacent columns and loads eight rows before it adds the first. */
template <int W>
STX__GLOBAL(128)
stx__embedding_tile_kernel(stx__array dtable, float *part, stx__array dy, const int32_t *id,
                           const size_t *position, size_t N, size_t C) {
    STX__SHARED(int32_t, ids, STX__ID_TILE + 2); /* including a neighbour on each side */
    STX__SHARED(size_t, rows, STX__ID_TILE);
    const size_t lo = (size_t)blockIdx.x * STX__ID_TILE;
    const int n = (int)(N - lo < (size_t)STX__ID_TILE ? N - lo : (size_t)STX__ID_TILE);
    for (int i = threadIdx.x; i < n + 2; i += blockDim.x) {
        ids[i] = lo + i >= 1 && lo + i - 1 < N ? id[lo + i - 1] : -1;
        if (i < n) rows[i] = position[lo + i];
    }
    __syncthreads();
    for (size_t c = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W; c < C;
         c += (size_t)gridDim.y * blockDim.x * W) {
        for (int i = 0, end; i < n; i = end) { /* the run [i, end) */
            int32_t me = ids[i + 1];
            int begun = (i == 0 && lo && ids[0] == me), continues;
            float sum[W] = {0};
            for (end = i + 1; end < n && ids[end + 1] == me;) end++;
            continues = end == n && lo + n < N && ids[n + 1] == me;
            for (int k = i; k < end; k += 8) {
                float v[8][W];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (k + j < end)
                        stx__getn<W>(v[j], dy, rows[k + j] * C + c);
                    else
                        for (int e = 0; e < W; e++) v[j][e] = 0;
                }
#pragma unroll
                for (int j = 0; j < 8; j++)
                    for (int e = 0; e < W; e++) sum[e] += v[j][e];
            }

            if (begun || continues) {
                for (int e = 0; e < W; e++)
                    part[(2 * (size_t)blockIdx.x + (i != 0)) * C + c + e] = sum[e];
            } else {
                stx__addn<W>(dtable, (size_t)me * C + c, sum, 1);
            }
        }
    }
}

/* Sums, second stage: if a run extends over several tiles, the block of its first tile
   adds all partial sums of the run to dtable, tile by tile. */
template <int W>
STX__GLOBAL(128)
stx__embedding_run_kernel(stx__array dtable, const float *part, const int32_t *id, size_t N,
                          size_t C) {
    const size_t tile = blockIdx.x, last = (tile + 1) * STX__ID_TILE - 1,
                 tiles = (N + STX__ID_TILE - 1) / STX__ID_TILE;
    const int32_t me = last + 1 < N ? id[last] : -1;
    const int whole = last < N && id[tile * STX__ID_TILE] == me;
    size_t end = tile + 1;
    if (last + 1 >= N || id[last + 1] != me) return;                /* the last run ends here */
    if (whole && tile && id[tile * STX__ID_TILE - 1] == me) return; /* the run began earlier */
    while (end < tiles && id[end * STX__ID_TILE] == me) end++;
    for (size_t c = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W; c < C;
         c += (size_t)gridDim.y * blockDim.x * W) {
        float sum[W];
        for (int e = 0; e < W; e++) sum[e] = part[(2 * tile + !whole) * C + c + e];
        for (size_t k = tile + 1; k < end; k += 16) {
            float v[16][W];
#pragma unroll
            for (int j = 0; j < 16; j++)
                for (int e = 0; e < W; e++)
                    v[j][e] = k + j < end ? part[2 * (k + j) * C + c + e] : 0;
#pragma unroll
            for (int j = 0; j < 16; j++)
                for (int e = 0; e < W; e++) sum[e] += v[j][e];
        }
        stx__addn<W>(dtable, (size_t)me * C + c, sum, 1);
    }
}

void stx_embedding_bwd_cuda(stx_ctx *x, stx_real *dtable, const stx_real *dy, const int32_t *ids,
                            size_t N, size_t C) {
    const char *name = "stx_embedding_bwd";
    stx__array D = stx__array_of(x, dtable), G = stx__array_of(x, dy);
    const size_t chunks = (N + STX__SORT - 1) / STX__SORT,
                 tiles = (N + STX__ID_TILE - 1) / STX__ID_TILE;
    const int four = C % 4 == 0 && stx__aligned4(D) && stx__aligned4(G);
    const dim3 grid((unsigned)tiles, stx__blocks(C, four ? 512 : 128, 65535));
    uint32_t *sorted, *index; /* (chunks,2048) */
    size_t *position;         /* (N), sorted by id */
    float *part;              /* (tiles,2,C) */
    int32_t *id;              /* (N), sorted */
    size_t bytes = 2 * chunks * STX__SORT * sizeof *sorted + N * sizeof *position
                   + 2 * tiles * C * sizeof *part + N * sizeof *id;
    if (!N || !C) return;
    sorted = (uint32_t *)stx__scratch_of(x, bytes, name);
    if (!sorted) return;
    index = sorted + chunks * STX__SORT;
    position = (size_t *)(void *)(index + chunks * STX__SORT);
    part = (float *)(void *)(position + N);
    id = (int32_t *)(void *)(part + 2 * tiles * C);

    STX__RUN_KERNEL(x, name, stx__embedding_sort_kernel, (unsigned)chunks, 1024, 0, sorted, index,
                    ids, N);
    STX__RUN_KERNEL(x, name, stx__embedding_rank_kernel, stx__grid(x, chunks * STX__SORT), 256, 0,
                    id, position, sorted, index, chunks);
    STX__CHOOSE(W, four ? 4 : 1, (1, 4),
                STX__RUN_KERNEL(x, name, stx__embedding_tile_kernel<W>, grid, 128, 0, D, part, G,
                                id, position, N, C);
                STX__RUN_KERNEL(x, name, stx__embedding_run_kernel<W>, grid, 128, 0, D, part, id, N,
                                C));
}
