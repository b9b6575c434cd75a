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

#define STRETCH 256  /* keys at once, at least one block */
#define FEW (TILE_ROWS / 2)  /* rows: the heads of a group in a decode, mostly */

/* What all items share. */
struct step {
    const float *q;   /* [tokens][num_heads][head_dim], `q_stride` floats from token to token */
    const float *keys, *values;
    float *out;       /* [tokens][num_heads][head_dim] */
    long q_stride, num_heads, num_kv_heads, head_dim, block_size;
};

/* `side` vectors from `w` on, and others from `second` on, with what will be read next. */
INLINE struct weights floats(const float *w, const float *second, const float *next, const float *second_next,
                             long stride) {
    return (struct weights){(const char *)w,           (const char *)second, (const char *)next,
                            (const char *)second_next, stride,               4 * stride};
}

/* y (+)= x · w, all row by row: vectors as far as they go, and the rest of the columns one by one. `next` is the w of
   the call that follows. */
INLINE void multiply(long rows, const float *x, long x_stride, const float *w, const float *next, long w_stride,
                     long depth, float *y, long y_stride, long columns, int add) {
    long c = 0;
    for (; rows <= FEW && c + 2 * PANEL <= columns; c += 2 * PANEL) {
        struct weights two = floats(w + c, w + c + PANEL, next + c, next + c + PANEL, w_stride);
        tiles(rows, 4, 2, FLOAT32, x, x_stride, two, depth, y + c, y_stride, add);
    }
    for (; c + PANEL <= columns; c += PANEL) {
        struct weights one = floats(w + c, NULL, next + c, NULL, w_stride);
        tiles(rows, 2, 2, FLOAT32, x, x_stride, one, depth, y + c, y_stride, add);
    }
    for (; c + LANES <= columns; c += LANES) {
        struct weights half = floats(w + c, NULL, next + c, NULL, w_stride);
        tiles(rows, 1, 1, FLOAT32, x, x_stride, half, depth, y + c, y_stride, add);
    }
    for (; c < columns; c++)
        for (long r = 0; r < rows; r++) {
            float sum = add ? y[r * y_stride + c] : 0.0f;
            for (long k = 0; k < depth; k++) sum += x[r * x_stride + k] * w[k * w_stride + c];
            y[r * y_stride + c] = sum;
        }
}

/* The scores with two blocks at once: with one there are too few sums, and each waits for the one before. */
INLINE void two_blocks(long rows, const float *queries, struct weights keys, long dim, float *scores, long stride) {
    if (keys.stride == PANEL)
        tiles(rows, 4, 2, FLOAT32, queries, dim, keys, dim, scores, stride, 0);
    else
        tiles(rows, 2, 1, FLOAT32, queries, dim, keys, dim, scores, stride, 0);
}

/* Turn one row's scores into weights, of which those from `visible` on are 0, and scale what the row has summed up.
   `total` is the sum of its weights, lane by lane. */
static void soften(float *scores, long padded, long visible, float *most, vec *total, float *sums, long head_dim) {
    for (long t = visible < 0 ? 0 : visible; t < padded; t++) scores[t] = -INFINITY;
    vec maxima = (vec){0} + *most, weights = {0};
    for (long t = 0; t < padded; t += LANES) maxima = larger(maxima, *(vec *)(scores + t));
    float largest = *most;
    for (int lane = 0; lane < LANES; lane++) largest = maxima[lane] > largest ? maxima[lane] : largest;
    for (long t = 0; t < padded; t += LANES) {
        vec w = exp_vec(*(vec *)(scores + t) - largest);
        *(vec *)(scores + t) = w;
        weights += w;
    }
    float scale = largest > *most ? expf(*most - largest) : 1.0f;
    if (scale != 1.0f)
        for (long d = 0; d < head_dim; d++) sums[d] *= scale;
    *total = *total * scale + weights;
    *most = largest;
}

/* Queries `first_token` .. of one request, at `position` .. of it, through the heads that share `kv_head`. `room` has
   place for the rows' queries, outputs, scores (`padded` of each), maxima and totals. */
INLINE void attend(const struct step *s, long dim, long padded, const int32_t *table, long first_token, long num_queries,
                   long position, long kv_head, float *room) {
    long group = s->num_heads / s->num_kv_heads, rows = num_queries * group, size = s->block_size;
    long stretch = size > STRETCH ? size : STRETCH / size * size;
    float *queries = room, *outputs = queries + rows * dim, *scores = outputs + rows * dim;
    float *most = scores + rows * padded;
    vec *total = (vec *)(most + rows);
    float scale = 1.0f / sqrtf((float)dim);
    for (long r = 0; r < rows; r++) {
        const float *q = s->q + (first_token + r / group) * s->q_stride + (kv_head * group + r % group) * dim;
        for (long d = 0; d < dim; d++) queries[r * dim + d] = q[d] * scale, outputs[r * dim + d] = 0.0f;
        most[r] = -INFINITY, total[r] = (vec){0};
    }
    long end = position + num_queries;  /* keys that the last query sees */
    long step = s->num_kv_heads * size * dim;  /* floats from block to block */
    const float *all_keys = s->keys + kv_head * size * dim, *all_values = s->values + kv_head * size * dim;
    for (long start = 0; start < end; start += stretch) {
        long num_keys = end - start < stretch ? end - start : stretch;
        const int32_t *blocks = table + start / size;
        long num_blocks = (num_keys + size - 1) / size;
        long used = (num_keys + LANES - 1) / LANES * LANES;
        int in_pairs = size == LANES || (size == PANEL && rows <= FEW);
        for (long b = 0; b < num_blocks;) {
            const float *keys[4];  /* of this block and those behind it, or of the last one */
            for (long i = 0; i < 4; i++) keys[i] = all_keys + blocks[b + i < num_blocks ? b + i : num_blocks - 1] * step;
            float *columns = scores + b * size;
            if (in_pairs && b + 1 < num_blocks) {
                two_blocks(rows, queries, floats(keys[0], keys[1], keys[2], keys[3], size), dim, columns, padded);
                b += 2;
            } else {
                multiply(rows, queries, dim, keys[0], keys[1], size, dim, columns, padded, size, 0);
                b += 1;
            }
        }
        /* A query sees its own key and those before it. What lies behind the last token in its block, a former
           owner's, may be NaN: `soften` overwrites its score, and its value is never read. */
        for (long r = 0; r < rows; r++) {
            long visible = position + r / group + 1 - start;
            soften(scores + r * padded, used, visible < num_keys ? visible : num_keys, most + r, total + r,
                   outputs + r * dim, dim);
        }
        for (long b = 0; b < num_blocks; b++) {
            long filled = num_keys - b * size < size ? num_keys - b * size : size;
            const float *values = all_values + blocks[b] * step;
            const float *next = all_values + blocks[b + 1 < num_blocks ? b + 1 : b] * step;
            multiply(rows, scores + b * size, padded, values, next, dim, filled, outputs, dim, dim, 1);
        }
    }
    for (long r = 0; r < rows; r++) {
        float *out = s->out + ((first_token + r / group) * s->num_heads + kv_head * group + r % group) * dim;
        float sum = 0.0f;
        for (int lane = 0; lane < LANES; lane++) sum += total[r][lane];
        float share = 1.0f / sum;
        for (long d = 0; d < dim; d++) out[d] = outputs[r * dim + d] * share;
    }
}

/* Items are four numbers each: where its request's blocks begin in `tables`, its first query's token, how many queries,
   the first one's position. They are taken from the last to the first, since callers put the long ones at the end.
   Returns whether there was too little memory. */
int attention(const float *q, long q_stride, const float *keys, const float *values, const int32_t *tables,
               const int32_t *items, long num_items, long most_queries, long num_heads, long num_kv_heads,
               long head_dim, long block_size, float *out) {
    struct step step = {q, keys, values, out, q_stride, num_heads, num_kv_heads, head_dim, block_size};
    long rows = most_queries * (num_heads / num_kv_heads);
    long padded = block_size > STRETCH ? (block_size + LANES - 1) / LANES * LANES : STRETCH;
    long num_pieces = num_items * num_kv_heads;
    int no_memory = 0;
#pragma omp parallel if (num_pieces > 1) reduction(| : no_memory)
    {
        float *room = malloc(rows * (2 * head_dim + padded + 1 + LANES) * sizeof(float));
        /* One KV head after the other: requests that share a prefix find it in the cache. */
#pragma omp for schedule(dynamic)
        for (long piece = num_pieces - 1; piece >= 0; piece--) {
            const int32_t *item = items + 4 * (piece % num_items);
            const int32_t *table = tables + item[0];
            long kv_head = piece / num_items;
            if (!room) continue;
            /* With constants for the usual sizes, a tile knows where its rows lie: a row needs no pointer of its own. */
            if (head_dim == 64 && padded == STRETCH)
                attend(&step, 64, STRETCH, table, item[1], item[2], item[3], kv_head, room);
            else if (head_dim == 128 && padded == STRETCH)
                attend(&step, 128, STRETCH, table, item[1], item[2], item[3], kv_head, room);
            else
                attend(&step, head_dim, padded, table, item[1], item[2], item[3], kv_head, room);
        }
        no_memory |= room == NULL;
        free(room);
    }
    return no_memory;
}

/* Put new keys and values into their blocks, item by item (see `attention`); k and v are
   [tokens][num_kv_heads][head_dim], with so many floats from token to token. */
void store(const float *k, long k_stride, const float *v, long v_stride, const int32_t *tables, const int32_t *items,
           long num_items, float *keys, float *values, long num_kv_heads, long head_dim, long block_size) {
    const int32_t *last = items + 4 * (num_items - 1);
    long num_tokens = num_items ? last[1] + last[2] : 0;  /* of the step: up to the last item's end */
#pragma omp parallel for if (num_tokens >= 64)
    for (long i = 0; i < num_items; i++) {
        const int32_t *table = tables + items[4 * i];
        for (long n = 0; n < items[4 * i + 2]; n++) {
            long token = items[4 * i + 1] + n, position = items[4 * i + 3] + n, offset = position % block_size;
            for (long h = 0; h < num_kv_heads; h++) {
                long base = (table[position / block_size] * num_kv_heads + h) * block_size * head_dim;
                const float *key = k + token * k_stride + h * head_dim;
                for (long d = 0; d < head_dim; d++) keys[base + d * block_size + offset] = key[d];
                memcpy(values + base + offset * head_dim, v + token * v_stride + h * head_dim, head_dim * sizeof(float));
            }
        }
    }
}
