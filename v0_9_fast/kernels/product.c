/* y = x · Wᵀ (+ bias), or y += x · Wᵀ: the product of few rows with a large matrix, which is what a decode step is.

   W [width][depth] is packed once, when the model is loaded, in panels of PANEL rows of W, which are columns of the
   output. A panel holds, for each k, its PANEL weights side by side, so that it is read from its first byte to its last:

       panel 0: W[0][0] W[1][0] ... W[PANEL-1][0]   W[0][1] W[1][1] ...      panel 1: W[PANEL][0] ...

   Who owns what: each thread has a run of panels, and writes these columns of y, for all rows. Nobody waits for
   anybody. With one row the product is bound by reading W; with many by arithmetic, and then a panel should stay in the
   first cache for all rows. So a panel is taken in blocks of DEPTH weights deep, and many rows in blocks of ROWS, which
   with their part of x fit into the second cache. 16-bit weights are widened in the registers if two tiles have all rows,
   else once for all tiles. */
#include "tile.h"

#define DEPTH 256
#define ROWS 96
#define AHEAD 16384  /* bytes: far enough that memory answers in time, and not so far that it's forgotten again */

/* `columns` of y from `panel` on, which are those of one panel, or, with `vectors` 4, of two. The last one may be wider
   than what is left of y. */
INLINE void some_panels(int vectors, int stored, const float *x, long num_rows, long depth, const char *panel,
                        const float *bias, float *y, long width, long columns, int add) {
    long whole = vectors * LANES;
    float edge[ROWS][2 * PANEL];  /* where whole vectors are written when y has no room for them */
    float *target = columns == whole ? y : edge[0];
    long stride = columns == whole ? width : 2 * PANEL;
    int started = add || columns != whole || bias;
    if (columns != whole || bias)  /* start from what is there already, and from the bias */
        for (long r = 0; r < num_rows; r++)
            for (long c = 0; c < columns; c++)
                target[r * stride + c] = (add ? y[r * width + c] : 0.0f) + (bias ? bias[c] : 0.0f);
    for (long k = 0; k < depth; k += DEPTH) {
        long deep = depth - k < DEPTH ? depth - k : DEPTH;
        const char *block = panel + k * PANEL * SIZE(stored), *second = block + depth * PANEL * SIZE(stored);
        if (stored == FLOAT32 || num_rows <= 2 * TILE_ROWS) {
            struct weights w = {block, second, block + AHEAD, second + AHEAD, PANEL, PANEL * SIZE(stored)};
            tiles(num_rows, vectors, 2, stored, x + k, depth, w, deep, target, stride, started || k > 0);
        } else {
            float wide[DEPTH * PANEL];
            for (long i = 0; i < deep * PANEL; i += LANES) *(vec *)(wide + i) = load(block, i, stored);
            struct weights w = {(const char *)wide, NULL, block + AHEAD, NULL, PANEL, PANEL * SIZE(stored)};
            tiles(num_rows, 2, 2, FLOAT32, x + k, depth, w, deep, target, stride, started || k > 0);
        }
    }
    if (columns != whole)
        for (long r = 0; r < num_rows; r++) memcpy(y + r * width, edge[r], columns * sizeof(float));
}

INLINE void all_panels(int stored, const float *x, long num_rows, long depth, const char *panels, const float *bias,
                       float *y, long width, int add) {
    long num_panels = (width + PANEL - 1) / PANEL, panel_bytes = depth * PANEL * SIZE(stored);
    /* Few rows have few sums, and each waits for the one before: with two panels at once there are twice as many. */
    int wide = num_rows <= TILE_ROWS / 2;
#pragma omp parallel
    {
        long num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
        long first_panel = num_panels * thread / num_threads, end_panel = num_panels * (thread + 1) / num_threads;
        for (long row = 0; row < num_rows; row += ROWS)
            for (long p = first_panel; p < end_panel;) {
                long rows = num_rows - row < ROWS ? num_rows - row : ROWS, both = wide && p + 1 < end_panel;
                long left = width - p * PANEL, columns = (1 + both) * PANEL < left ? (1 + both) * PANEL : left;
                const float *from = x + row * depth, *some_bias = bias ? bias + p * PANEL : NULL;
                float *to = y + row * width + p * PANEL;
                const char *panel = panels + p * panel_bytes;
                if (both)
                    some_panels(4, stored, from, rows, depth, panel, some_bias, to, width, columns, add);
                else
                    some_panels(2, stored, from, rows, depth, panel, some_bias, to, width, columns, add);
                p += 1 + both;
            }
    }
}

/* x [num_rows][depth], y [num_rows][width], both one row after the other; `bias` [width] or NULL. */
void product(const float *x, long num_rows, long depth, const void *panels, int stored, const float *bias, float *y,
             long width, int add) {
    switch (stored) {
        case FLOAT32: all_panels(FLOAT32, x, num_rows, depth, panels, bias, y, width, add); break;
        case FLOAT16: all_panels(FLOAT16, x, num_rows, depth, panels, bias, y, width, add); break;
        case BFLOAT16: all_panels(BFLOAT16, x, num_rows, depth, panels, bias, y, width, add); break;
    }
}

/* Columns of a panel: whoever packs has to know. */
int panel_width(void) { return PANEL; }

/* How many threads the kernels take that this thread calls. */
void use_threads(int num_threads) { omp_set_num_threads(num_threads); }
