/* Calls each kernel with memory of exactly the size that it may touch: sanitizers end the program where one goes
   beyond. What they compute is tested from Python. */
#include <stdio.h>
#include <stdlib.h>

#include "tile.h"

void product(const float *, long, long, const void *, int, const float *, float *, long, int);
void rms_norm(const float *, long, long, const float *, float, float *);
void rotate(float *, long, long, long, long, const float *, const float *);
void silu_mul(const float *, long, long, float *);
void store(const float *, long, const float *, long, const int32_t *, const int32_t *, long, float *, float *, long, long,
           long);
int attention(const float *, long, const float *, const float *, const int32_t *, const int32_t *, long, long, long,
               long, long, long, float *);

static float *floats(long n) {
    float *x = malloc(n * sizeof(float));
    for (long i = 0; i < n; i++) x[i] = (float)(i % 13) / 13 - 0.5f;
    return x;
}

static void products(long rows, long depth, long width) {
    long panels = (width + PANEL - 1) / PANEL;
    for (int stored = FLOAT32; stored <= BFLOAT16; stored++)
        for (int add = 0; add < 2; add++) {
            float *x = floats(rows * depth), *bias = floats(width), *y = floats(rows * width);
            void *w = calloc(panels * PANEL * depth, stored == FLOAT32 ? 4 : 2);
            product(x, rows, depth, w, stored, add ? bias : NULL, y, width, add);
            free(x), free(bias), free(y), free(w);
        }
}

static void by_row(long rows, long width) {
    float *x = floats(rows * width), *weight = floats(width), *out = floats(rows * width);
    rms_norm(x, rows, width, weight, 1e-5f, out);
    free(x), free(weight), free(out);
    x = floats(rows * 2 * width), out = floats(rows * width);
    silu_mul(x, rows, width, out);
    free(x), free(out);
    float *heads = floats(rows * 3 * 16), *cos = floats(rows * 8), *sin = floats(rows * 8);
    rotate(heads, rows, 3 * 16, 2, 16, cos, sin);
    free(heads), free(cos), free(sin);
}

/* One request of `context` tokens, the last `queries` of which are new, in blocks from the last to the first. */
static void attend(long context, long queries, long heads, long kv_heads, long dim, long size) {
    long blocks = (context + size - 1) / size, stride = (heads + 2 * kv_heads) * dim;
    float *qkv = floats(queries * stride), *out = floats(queries * heads * dim);
    float *keys = floats(blocks * kv_heads * size * dim), *values = floats(blocks * kv_heads * size * dim);
    int32_t *table = malloc(blocks * sizeof *table), item[4] = {0, 0, (int32_t)queries, (int32_t)(context - queries)};
    for (long b = 0; b < blocks; b++) table[b] = (int32_t)(blocks - 1 - b);
    store(qkv + heads * dim, stride, qkv + (heads + kv_heads) * dim, stride, table, item, 1, keys, values, kv_heads, dim,
          size);
    if (attention(qkv, stride, keys, values, table, item, 1, queries, heads, kv_heads, dim, size, out))
        exit(1);
    free(qkv), free(out), free(keys), free(values), free(table);
}

int main(void) {
    long rows[] = {1, 2, 6, 7, 13, 25, 97}, widths[] = {1, 15, 16, 17, 32, 70}, depths[] = {1, 37, 256, 513};
    for (int r = 0; r < 7; r++)
        for (int w = 0; w < 6; w++) {
            by_row(rows[r], widths[w]);
            for (int d = 0; d < 4; d++) products(rows[r], depths[d], widths[w]);
        }
    long dims[] = {16, 20, 64, 80, 128}, sizes[] = {1, 4, 8, 16, 24, 32, 256};
    for (int d = 0; d < 5; d++)
        for (int s = 0; s < 7; s++) {
            attend(1, 1, 9, 3, dims[d], sizes[s]);
            attend(300, 1, 9, 3, dims[d], sizes[s]);
            attend(129, 8, 9, 3, dims[d], sizes[s]);
            attend(17, 17, 8, 8, dims[d], sizes[s]);
            attend(40, 1, 40, 1, dims[d], sizes[s]);
        }
    puts("all kernels called");
    return 0;
}
