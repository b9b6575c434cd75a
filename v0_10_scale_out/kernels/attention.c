/* Attention that reads the KV cache where it lies, through the block tables: nothing is gathered, nothing is padded.

   A block of one layer and one KV head holds its keys transposed, and its values as they are:

       keys   [num_blocks][num_kv_heads][head_dim][block_size]
       values [num_blocks][num_kv_heads][block_size][head_dim]

   So that both products of attention are tiles (tile.h), with the rows of all queries that see these keys:

       scores [rows][block_size] = queries [rows][head_dim] · keys     outputs [rows][head_dim] += weights · values

   An *item* is a run of queries of one request: a decode has one of them, a chunk of a prompt several. With the query
   heads of one KV head they are the rows, which all read the same keys. Threads take (KV head, item) by (KV head, item),
   and write these rows of the output; nobody else does.

   Softmax goes along (Milakov and Gimelshein, 2018; FlashAttention): keys come in stretches of STRETCH, and if one has a
   larger score than all before it, what has been summed up is scaled down. */
#include <stdlib.h>

#include "tile.h"

#define STRETCH 128  /* keys, at least one block */
#define FEW (TILE_ROWS / 2)  /* rows: the heads of a group in a decode, mostly */

/* What all items share. */
struct step {
    const float *q;   /* [tokens][num_heads][head_dim], `q_stride` floats from token to token */
    const float *keys, *values;
    float *out;       /* [tokens][num_heads][head_dim] */
    long q_stride, num_heads, num_kv_heads, head_dim, block_size;
};

/* y (+)= x · w, all row by row: vectors as far as they go, and the rest of the columns one by one. */
static void multiply(long rows, const float *x, long x_stride, const float *w, long w_stride, long depth, float *y,
                     long y_stride, long columns, int add, long ahead) {
    long c = 0;
    for (; rows <= FEW && c + 2 * PANEL <= columns; c += 2 * PANEL)
        tiles(rows, 4, 2, FLOAT32, x, x_stride, w + c, w_stride, PANEL, depth, y + c, y_stride, add, ahead);
    for (; c + PANEL <= columns; c += PANEL)
        tiles(rows, 2, 2, FLOAT32, x, x_stride, w + c, w_stride, 0, depth, y + c, y_stride, add, ahead);
    for (; c + LANES <= columns; c += LANES)
        tiles(rows, 1, 1, FLOAT32, x, x_stride, w + c, w_stride, 0, depth, y + c, y_stride, add, ahead);
    for (; c < columns; c++)
        for (long r = 0; r < rows; r++) {
            float sum = add ? y[r * y_stride + c] : 0.0f;
            for (long k = 0; k < depth; k++) sum += x[r * x_stride + k] * w[k * w_stride + c];
            y[r * y_stride + c] = sum;
        }
}

/* The scores of few rows with two blocks at once, `second` floats apart: else there are too few sums, and each waits for
   the one before. */
static void two_blocks(long rows, const float *queries, const float *keys, long second, long size, long dim,
                       float *scores, long stride, long ahead) {
    if (size == PANEL)
        tiles(rows, 4, 2, FLOAT32, queries, dim, keys, size, second, dim, scores, stride, 0, ahead);
    else
        tiles(rows, 2, 1, FLOAT32, queries, dim, keys, size, second, dim, scores, stride, 0, ahead);
}

/* Turn one row's scores into weights, of which those from `visible` on are 0, and scale what the row has summed up. */
static void soften(float *scores, long padded, long visible, float *most, float *total, float *sums, long head_dim) {
    for (long t = visible < 0 ? 0 : visible; t < padded; t++) scores[t] = -INFINITY;
    float largest = *most;
    for (long t = 0; t < padded; t++) largest = scores[t] > largest ? scores[t] : largest;
    vec weights = {0};
    for (long t = 0; t < padded; t += LANES) {
        vec w = exp_vec(*(vec *)(scores + t) - largest);
        *(vec *)(scores + t) = w;
        weights += w;
    }
    float weight = 0.0f;
    for (int lane = 0; lane < LANES; lane++) weight += weights[lane];
    float scale = largest > *most ? expf(*most - largest) : 1.0f;
    if (scale != 1.0f)
        for (long d = 0; d < head_dim; d++) sums[d] *= scale;
    *total = *total * scale + weight;
    *most = largest;
}

/* Queries `first_token` .. of one request, at `position` .. of it, through the heads that share `kv_head`. `room` has
   place for the rows' queries, outputs, scores, maxima and totals. */
static void attend(const struct step *s, const int32_t *table, long first_token, long num_queries, long position,
                   long kv_head, float *room) {
    long group = s->num_heads / s->num_kv_heads, rows = num_queries * group, dim = s->head_dim, size = s->block_size;
    long stretch = size > STRETCH ? size : STRETCH / size * size, padded = (stretch + LANES - 1) / LANES * LANES;
    float *queries = room, *outputs = queries + rows * dim, *scores = outputs + rows * dim;
    float *most = scores + rows * padded, *total = most + rows;
    float scale = 1.0f / sqrtf((float)dim);
    for (long r = 0; r < rows; r++) {
        const float *q = s->q + (first_token + r / group) * s->q_stride + (kv_head * group + r % group) * dim;
        for (long d = 0; d < dim; d++) queries[r * dim + d] = q[d] * scale, outputs[r * dim + d] = 0.0f;
        most[r] = -INFINITY, total[r] = 0.0f;
    }
    long end = position + num_queries;  /* keys that the last query sees */
    long step = s->num_kv_heads * size * dim;  /* floats from block to block */
    const float *all_keys = s->keys + kv_head * size * dim, *all_values = s->values + kv_head * size * dim;
    for (long start = 0; start < end; start += stretch) {
        long num_keys = end - start < stretch ? end - start : stretch;
        const int32_t *blocks = table + start / size;
        long num_blocks = (num_keys + size - 1) / size;
        int in_pairs = rows <= FEW && (size == PANEL || size == LANES);
        for (long b = 0; b < num_blocks;) {
            const float *keys = all_keys + blocks[b] * step;
            long next = b + 1 < num_blocks ? b + 1 : b, after = b + 2 < num_blocks ? b + 2 : b;
            if (in_pairs && next > b) {
                two_blocks(rows, queries, keys, (blocks[next] - blocks[b]) * step, size, dim, scores + b * size, padded,
                           (blocks[after] - blocks[b]) * step * 4);
                b += 2;
            } else {
                multiply(rows, queries, dim, keys, size, dim, scores + b * size, padded, size, 0,
                         (blocks[next] - blocks[b]) * step * 4);
                b += 1;
            }
        }
        /* A query sees its own key and those before it. What lies behind the last token in its block, a former
           owner's, may be NaN: `soften` overwrites its score, and its value is never read. */
        for (long r = 0; r < rows; r++) {
            long visible = position + r / group + 1 - start;
            soften(scores + r * padded, padded, visible < num_keys ? visible : num_keys, most + r, total + r,
                   outputs + r * dim, dim);
        }
        for (long b = 0; b < num_blocks; b++) {
            long filled = num_keys - b * size < size ? num_keys - b * size : size;
            long next = b + 1 < num_blocks ? b + 1 : b;
            multiply(rows, scores + b * size, padded, all_values + blocks[b] * step, dim, filled, outputs, dim, dim, 1,
                     (blocks[next] - blocks[b]) * step * 4);
        }
    }
    for (long r = 0; r < rows; r++) {
        float *out = s->out + ((first_token + r / group) * s->num_heads + kv_head * group + r % group) * dim;
        float share = 1.0f / total[r];
        for (long d = 0; d < dim; d++) out[d] = outputs[r * dim + d] * share;
    }
}

/* Items are four numbers each: where its request's blocks begin in `tables`, its first query's token, how many queries,
   the first one's position. They are taken from the last to the first, since callers put the long ones at the end. Returns whether
   there was too little memory. */
int attention(const float *q, long q_stride, const float *keys, const float *values, const int32_t *tables,
               const int32_t *items, long num_items, long most_queries, long num_heads, long num_kv_heads,
               long head_dim, long block_size, float *out) {
    struct step step = {q, keys, values, out, q_stride, num_heads, num_kv_heads, head_dim, block_size};
    long rows = most_queries * (num_heads / num_kv_heads);
    long padded = (block_size > STRETCH ? block_size : STRETCH) + LANES;
    long num_pieces = num_items * num_kv_heads;
    int no_memory = 0;
#pragma omp parallel if (num_pieces > 1) reduction(| : no_memory)
    {
        float *room = malloc(rows * (2 * head_dim + padded + 2) * sizeof(float));
        /* One KV head after the other: requests that share a prefix find it in the cache. */
#pragma omp for schedule(dynamic)
        for (long piece = num_pieces - 1; piece >= 0; piece--) {
            const int32_t *item = items + 4 * (piece % num_items);
            if (room) attend(&step, tables + item[0], item[1], item[2], item[3], piece / num_items, room);
        }
        no_memory |= room == NULL;
        free(room);
    }
    return no_memory;
}

/* Put new keys and values into their slots (block * block_size + offset); k and v are [num_rows][num_kv_heads][head_dim]
   with so many floats from token to token. */
void store(const float *k, long k_stride, const float *v, long v_stride, long num_rows, const int64_t *slots,
           float *keys, float *values, long num_kv_heads, long head_dim, long block_size) {
#pragma omp parallel for if (num_rows >= 64)
    for (long r = 0; r < num_rows; r++) {
        long block = slots[r] / block_size, offset = slots[r] % block_size;
        for (long h = 0; h < num_kv_heads; h++) {
            long base = (block * num_kv_heads + h) * block_size * head_dim;
            const float *key = k + r * k_stride + h * head_dim;
            for (long d = 0; d < head_dim; d++) keys[base + d * block_size + offset] = key[d];
            memcpy(values + base + offset * head_dim, v + r * v_stride + h * head_dim, head_dim * sizeof(float));
        }
    }
}
