// Tree attention on the CPU. The meaning is that of `tree_attention` in api.py.
//
// Every sum runs in the order of logical positions, one term after the other: scores over the
// elements of a head, softmax denominators and values over the keys of a part, parts in ascending
// order. A key's place in the cache, the other rows and the division of the work among threads do
// not appear in that order, so a row scored in a tree has the bits of the same row decoded alone.
//
// Work is cut into tasks: rows of one request that share a KV head, and one part of their context
// (SPLIT positions at absolute multiples), or all parts where there are tasks enough without.
// Vectors run over rows and heads for scores and softmax, over the head's elements for values.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../vectors.h"

#ifndef SPLIT
#error "compile with -DSPLIT=<positions of a part>"
#endif

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t MAX_DIM = 256;
constexpr int64_t MAX_NODES = 256;
constexpr int64_t MAX_LANES = 64;                        // rows times heads of a task
constexpr int KEYS = 8;                                  // scored at once
constexpr int64_t DIM_STEP = 64;                         // elements of a head summed at a stretch
constexpr int VALUE_ROWS = MANY_REGISTERS ? 6 : 2;       // rows times heads weighed at once
constexpr int VALUE_VECS = 4;                            // vectors of a head weighed at once

}  // namespace

// Mirrored by `_Arguments` in compiled.py. Strides count elements.
struct Arguments {
    const void* query;
    const void* keys;
    const void* values;
    const float* key_scales;    // or null
    const float* value_scales;  // or null
    const float* sinks;         // or null
    void* out;                  // [rows, heads, dim], contiguous
    const int32_t* cu_nodes;
    const int32_t* committed;
    const int32_t* tables;
    const int32_t* depths;
    const int32_t* parents;
    const uint8_t* is_chain;
    int64_t query_row, query_head;
    int64_t key_page, key_slot, key_head;
    int64_t value_page, value_slot, value_head;
    int64_t table_width, num_requests, num_heads, num_kv_heads, dim, page_shift;
    int64_t window;  // 0: none
    int64_t query_type, cache_type;  // 0 fp32, 1 bf16, 2 fp16, 3 int8, 4 e4m3fn
    int64_t num_threads;
    float scale, softcap;  // softcap 0: none
};

namespace {

struct Block {  // rows of one request
    int64_t request, first, rows, num_parts, partial;
};

struct Softmax {  // of MAX_LANES rows and heads over some keys
    alignas(64) float most[MAX_LANES];
    alignas(64) float total[MAX_LANES];
    alignas(64) float acc[MAX_LANES * MAX_DIM];
};

struct Workspace {
    alignas(64) float query[MAX_DIM * MAX_LANES];            // [dim][lane], scaled
    alignas(64) float keys[KEYS * MAX_DIM];                  // [key][dim]
    alignas(64) float values[SPLIT * MAX_DIM];               // [key][dim]
    alignas(64) float weights[(SPLIT + KEYS) * MAX_LANES];   // scores, then weights: [key][lane]
    alignas(64) float nodes[(MAX_NODES + KEYS) * MAX_LANES]; // scores of the own nodes
    alignas(64) float node_value[MAX_DIM];
    Softmax part, all;
    int32_t high[MAX_LANES], low[MAX_LANES];                 // a lane sees positions low..high
};

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename E>
INLINE void read_row(const typename E::type* p, int64_t dim, float scale, bool scaled, float* out) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        const vec x = E::read(p + d);
        store(out + d, scaled ? x * scale : x);
    }
    if (d < dim) {
        typename E::type tail[LANES] = {};
        memcpy(tail, p + d, (dim - d) * sizeof *tail);
        const vec x = E::read(tail);
        store(out + d, scaled ? x * scale : x);
    }
}

struct Place {
    int64_t page, offset;
};

INLINE Place place(const Arguments& a, int64_t request, int64_t slot) {
    const int64_t page = a.tables[request * a.table_width + (slot >> a.page_shift)];
    return {page, slot & ((1 << a.page_shift) - 1)};
}

INLINE float scale_at(const Arguments& a, const float* scales, Place at, int64_t head) {
    return scales ? scales[((at.page << a.page_shift) + at.offset) * a.num_kv_heads + head] : 1.0f;
}

template <typename E>
INLINE void read_key(const Arguments& a, Place at, int64_t head, float* out) {
    const auto* p = (const typename E::type*)a.keys + at.page * a.key_page +
                    at.offset * a.key_slot + head * a.key_head;
    read_row<E>(p, a.dim, scale_at(a, a.key_scales, at, head), a.key_scales, out);
}

template <typename E>
INLINE void read_value(const Arguments& a, Place at, int64_t head, float* out) {
    const auto* p = (const typename E::type*)a.values + at.page * a.value_page +
                    at.offset * a.value_slot + head * a.value_head;
    read_row<E>(p, a.dim, scale_at(a, a.value_scales, at, head), a.value_scales, out);
}

INLINE void read_query(const Arguments& a, int64_t at, float* out) {
    const auto* halves = (const uint16_t*)a.query + at;
    switch (a.query_type) {
        case 0: return read_row<Fp32>((const float*)a.query + at, a.dim, a.scale, true, out);
        case 1: return read_row<Bf16>(halves, a.dim, a.scale, true, out);
        default: return read_row<Fp16>(halves, a.dim, a.scale, true, out);
    }
}

// Scores of KEYS keys for VECS vectors of rows and heads: out [key][lane]. Sums of DIM_STEP
// elements are added up, which halves the error of wide heads.
template <int VECS>
void score_keys(const float* query, const float* keys, int64_t dim, int64_t lanes, float* out) {
    constexpr int AT_ONCE = MANY_REGISTERS ? (VECS <= 3 ? 8 : 4) : (VECS <= 2 ? 4 : 2);
    for (int first = 0; first < KEYS; first += AT_ONCE) {
        const float* k = keys + first * MAX_DIM;
        for (int64_t begin = 0; begin < dim; begin += DIM_STEP) {
            vec sum[AT_ONCE][VECS] = {};
            const int64_t end = std::min(begin + DIM_STEP, dim);
            for (int64_t d = begin; d < end; ++d) {
                vec q[VECS];
                for (int v = 0; v < VECS; ++v) q[v] = load(query + d * lanes + v * LANES);
                for (int j = 0; j < AT_ONCE; ++j) {
                    const vec x = splat(k[j * MAX_DIM + d]);
                    for (int v = 0; v < VECS; ++v) sum[j][v] = fma(x, q[v], sum[j][v]);
                }
            }
            for (int j = 0; j < AT_ONCE; ++j)
                for (int v = 0; v < VECS; ++v) {
                    float* s = out + (first + j) * lanes + v * LANES;
                    store(s, begin ? load(s) + sum[j][v] : sum[j][v]);
                }
        }
    }
}

void score(const float* query, const float* keys, int64_t dim, int64_t lanes, float* out) {
    int64_t at = 0;
    const auto run = [&](auto vecs) {
        constexpr int VECS = decltype(vecs)::value;
        // One call takes lanes at..at + VECS * LANES of rows that are `lanes` wide.
        score_keys<VECS>(query + at, keys, dim, lanes, out + at);
        at += VECS * LANES;
    };
    while (at < lanes) {
        switch (std::min<int64_t>((lanes - at) / LANES, 4)) {
            case 1: run(std::integral_constant<int, 1>()); break;
            case 2: run(std::integral_constant<int, 2>()); break;
            case 3: run(std::integral_constant<int, 3>()); break;
            default: run(std::integral_constant<int, 4>());
        }
    }
}

// acc [ROWS][VECS * LANES] = sum over keys of weight * value, key after key.
template <int ROWS, int VECS>
void weigh_values(const float* weights, int64_t lanes, const float* values, int64_t value_stride,
                  int64_t num_keys, float* acc) {
    vec sum[ROWS][VECS] = {};
    for (int64_t j = 0; j < num_keys; ++j) {
        vec v[VECS];
        for (int i = 0; i < VECS; ++i) v[i] = load(values + j * value_stride + i * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const vec w = splat(weights[j * lanes + r]);
            for (int i = 0; i < VECS; ++i) sum[r][i] = fma(w, v[i], sum[r][i]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < VECS; ++i) store(acc + r * MAX_DIM + i * LANES, sum[r][i]);
}

template <int ROWS>
void weigh_rows(const float* weights, int64_t lanes, const float* values, int64_t stride,
                int64_t num_keys, int64_t dim, float* acc) {
    for (int64_t d = 0; d < dim; d += VALUE_VECS * LANES) {
        const float* v = values + d;
        float* out = acc + d;
        switch (std::min<int64_t>((dim - d + LANES - 1) / LANES, VALUE_VECS)) {
            case 1: weigh_values<ROWS, 1>(weights, lanes, v, stride, num_keys, out); break;
            case 2: weigh_values<ROWS, 2>(weights, lanes, v, stride, num_keys, out); break;
            case 3: weigh_values<ROWS, 3>(weights, lanes, v, stride, num_keys, out); break;
            default: weigh_values<ROWS, 4>(weights, lanes, v, stride, num_keys, out);
        }
    }
}

void weigh(const float* weights, int64_t lanes, int64_t used, const float* values, int64_t stride,
           int64_t num_keys, int64_t dim, float* acc) {
    for (int64_t at = 0; at < used; at += VALUE_ROWS) {
        const float* w = weights + at;
        float* out = acc + at * MAX_DIM;
        switch (std::min<int64_t>(used - at, VALUE_ROWS)) {
            case 1: weigh_rows<1>(w, lanes, values, stride, num_keys, dim, out); break;
            case 2: weigh_rows<2>(w, lanes, values, stride, num_keys, dim, out); break;
            case 3: weigh_rows<3>(w, lanes, values, stride, num_keys, dim, out); break;
            case 4: weigh_rows<4>(w, lanes, values, stride, num_keys, dim, out); break;
            case 5: weigh_rows<5>(w, lanes, values, stride, num_keys, dim, out); break;
            default: weigh_rows<6>(w, lanes, values, stride, num_keys, dim, out);
        }
    }
}

// The log-sum-exp merge of two softmaxes; a part in which a lane saw nothing changes nothing.
void fold(float* most, float* total, float* acc, const float* part_most, const float* part_total,
          const float* part_acc, int64_t part_stride, int64_t used, int64_t dim) {
    for (int64_t m = 0; m < used; ++m) {
        const float top = std::max(most[m], part_most[m]);
        const float safe = top == NEVER ? 0.0f : top;
        const float a = exp_negative(splat(most[m] - safe))[0];
        const float b = exp_negative(splat(part_most[m] - safe))[0];
        most[m] = top;
        total[m] = total[m] * a + part_total[m] * b;
        for (int64_t d = 0; d < dim; d += LANES) {
            float* x = acc + m * MAX_DIM + d;
            const vec part = load(part_acc + m * part_stride + d) * b;
            store(x, fma(load(x), splat(a), part));
        }
    }
}

template <typename E>
class Task {
  public:
    Task(const Arguments& a, Workspace& w, const Block& block, int64_t head)
        : a(a), w(w), block(block), head(head) {
        groups = a.num_heads / a.num_kv_heads;
        used = block.rows * groups;
        lanes = round_up(used, LANES);
        start = a.cu_nodes[block.request];
        committed = a.committed[block.request];
        is_chain = a.is_chain[block.request] != 0;
        // A chain's rows are read like committed tokens; a tree's nodes are read apart.
        deepest = shallowest = committed + a.depths[start + block.first];
        for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t position = committed + a.depths[start + block.first + r];
            deepest = std::max(deepest, position);
            shallowest = std::min(shallowest, position);
            for (int64_t g = 0; g < groups; ++g) {
                w.high[r * groups + g] = (int32_t)position;
                w.low[r * groups + g] = a.window ? (int32_t)(position - a.window + 1) : 0;
            }
        }
        for (int64_t m = used; m < lanes; ++m) w.high[m] = w.low[m] = (int32_t)deepest;
        num_slots = is_chain ? deepest + 1 : committed;
        read_queries();
        if (!is_chain) score_nodes();
    }

    // The softmax of one part into w.part.
    void attend(int64_t index) {
        const int64_t begin = index * SPLIT;
        const int64_t end = std::min<int64_t>(begin + SPLIT, deepest + 1);
        const int64_t seen = a.window ? shallowest - a.window + 1 : 0;
        // Keys are scored KEYS at a time from here to the last that is read in order.
        const int64_t from = std::max(begin, seen > begin ? seen / KEYS * KEYS : begin);
        const int64_t to = std::max(from, std::min(end, num_slots));
        if (from >= end) return skip();
        for (int64_t slot = from; slot < to; slot += KEYS) {
            const int64_t count = std::min<int64_t>(KEYS, to - slot);
            for (int64_t j = 0; j < count; ++j) {
                const Place at = place(a, block.request, slot + j);
                read_key<E>(a, at, head, w.keys + j * MAX_DIM);
                read_value<E>(a, at, head, w.values + (slot + j - from) * padded_dim());
            }
            score(w.query, w.keys, a.dim, lanes, w.weights + (slot - from) * lanes);
        }
        cap(w.weights, (to - from) * lanes);
        hide(from, to);
        place_nodes(from, std::max(from, to), end);
        softmax(end - from);
        weigh(w.weights, lanes, used, w.values, padded_dim(), to - from, a.dim, w.part.acc);
        weigh_nodes(from, begin, end);
    }

    int64_t lanes, used, groups;

  private:
    const Arguments& a;
    Workspace& w;
    const Block& block;
    int64_t head, start, committed, deepest, shallowest, num_slots;
    bool is_chain;

    int64_t padded_dim() const { return round_up(a.dim, LANES); }

    void read_queries() {
        float row[MAX_DIM + LANES];
        for (int64_t m = 0; m < lanes; ++m) {
            if (m >= used) {
                for (int64_t d = 0; d < a.dim; ++d) w.query[d * lanes + m] = 0.0f;
                continue;
            }
            const int64_t at = (start + block.first + m / groups) * a.query_row +
                               (head * groups + m % groups) * a.query_head;
            read_query(a, at, row);
            for (int64_t d = 0; d < a.dim; ++d) w.query[d * lanes + m] = row[d];
        }
    }

    // Of all nodes that a row of the block may see: parents come before their children.
    void score_nodes() {
        const int64_t last = block.first + block.rows;
        for (int64_t node = 0; node < last; node += KEYS) {
            const int64_t count = std::min<int64_t>(KEYS, last - node);
            for (int64_t j = 0; j < count; ++j)
                read_key<E>(a, place(a, block.request, committed + node + j), head,
                            w.keys + j * MAX_DIM);
            score(w.query, w.keys, a.dim, lanes, w.nodes + node * lanes);
        }
        cap(w.nodes, last * lanes);
    }

    void cap(float* scores, int64_t count) {
        if (a.softcap == 0.0f) return;
        for (int64_t i = 0; i < count; i += LANES)
            store(scores + i, tanh_of(load(scores + i) / splat(a.softcap)) * a.softcap);
    }

    void skip() {
        std::fill(w.part.most, w.part.most + lanes, NEVER);
        std::fill(w.part.total, w.part.total + lanes, 0.0f);
        for (int64_t m = 0; m < used; ++m)
            std::fill_n(w.part.acc + m * MAX_DIM, padded_dim(), 0.0f);
    }

    void hide(int64_t from, int64_t to) {
        const int64_t low_edge = a.window ? deepest - a.window + 1 : 0;
        for (int64_t position = from; position < to; ++position) {
            if (position >= low_edge && position <= shallowest) continue;
            for (int64_t m = 0; m < lanes; m += LANES) {
                ivec high, low;
                memcpy(&high, w.high + m, sizeof high);
                memcpy(&low, w.low + m, sizeof low);
                const ivec here = ivec{} + (int32_t)position;
                float* s = w.weights + (position - from) * lanes + m;
                store(s, (here <= high) & (here >= low) ? load(s) : splat(NEVER));
            }
        }
    }

    template <typename F>
    void each_ancestor(int64_t r, int64_t from, int64_t end, F use) {
        int64_t path[MAX_NODES];
        int64_t length = 0;
        for (int64_t node = block.first + r; node >= 0; node = a.parents[start + node])
            path[length++] = node;
        const int64_t low = a.window ? w.low[r * groups] : 0;
        for (int64_t depth = 0; depth < length; ++depth) {
            const int64_t position = committed + depth;
            if (position >= from && position < end && position >= low)
                use(position, path[length - 1 - depth]);
        }
    }

    // Writes the scores of every row's ancestors where their positions are.
    void place_nodes(int64_t from, int64_t to, int64_t end) {
        if (is_chain || end <= to) return;
        std::fill(w.weights + (to - from) * lanes, w.weights + (end - from) * lanes, NEVER);
        for (int64_t r = 0; r < block.rows; ++r)
            each_ancestor(r, to, end, [&](int64_t position, int64_t node) {
                for (int64_t m = r * groups; m < (r + 1) * groups; ++m)
                    w.weights[(position - from) * lanes + m] = w.nodes[node * lanes + m];
            });
    }

    // Scores to weights, their largest and their sum, for every lane.
    void softmax(int64_t count) {
        for (int64_t m = 0; m < lanes; m += LANES) {
            vec most = splat(NEVER);
            for (int64_t j = 0; j < count; ++j) most = larger(load(w.weights + j * lanes + m), most);
            store(w.part.most + m, most);
            const vec safe = most == NEVER ? vec{} : most;
            vec total = {};
            for (int64_t j = 0; j < count; ++j) {
                float* s = w.weights + j * lanes + m;
                const vec weight = exp_negative(load(s) - safe);
                store(s, weight);
                total += weight;
            }
            store(w.part.total + m, total);
        }
    }

    void weigh_nodes(int64_t from, int64_t begin, int64_t end) {
        if (is_chain || end <= committed) return;
        for (int64_t r = 0; r < block.rows; ++r)
            each_ancestor(r, std::max(begin, committed), end, [&](int64_t position, int64_t node) {
                read_value<E>(a, place(a, block.request, committed + node), head, w.node_value);
                for (int64_t m = r * groups; m < (r + 1) * groups; ++m) {
                    const vec weight = splat(w.weights[(position - from) * lanes + m]);
                    for (int64_t d = 0; d < a.dim; d += LANES) {
                        float* x = w.part.acc + m * MAX_DIM + d;
                        store(x, fma(weight, load(w.node_value + d), load(x)));
                    }
                }
            });
    }
};

// The sink joins last: one more score without a value. Then weights are normalised and rounded.
void finish(const Arguments& a, const Block& block, int64_t head, float* most, float* total,
            float* acc) {
    const int64_t groups = a.num_heads / a.num_kv_heads;
    for (int64_t m = 0; m < block.rows * groups; ++m) {
        const int64_t query_head = head * groups + m % groups;
        float grown = total[m], shrink = 1.0f;
        if (a.sinks) {
            const float sink = a.sinks[query_head];
            const float top = std::max(most[m], sink);
            const float safe = top == NEVER ? 0.0f : top;
            shrink = exp_negative(splat(most[m] - safe))[0];
            grown = total[m] * shrink + exp_negative(splat(sink - safe))[0];
        }
        const float factor = grown == 0.0f ? 0.0f : shrink / grown;
        const int64_t row = a.cu_nodes[block.request] + block.first + m / groups;
        const int64_t at = (row * a.num_heads + query_head) * a.dim;
        for (int64_t d = 0; d < a.dim; ++d) {
            const float x = acc[m * MAX_DIM + d] * factor;
            if (a.query_type == 0) ((float*)a.out)[at + d] = x;
            else ((uint16_t*)a.out)[at + d] = a.query_type == 1 ? to_bf16(x) : to_fp16(x);
        }
    }
}

Workspace& workspace() {
    thread_local std::vector<char> memory(sizeof(Workspace) + 64);
    return *(Workspace*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

template <typename E>
void whole(const Arguments& a, const Block& block, int64_t head) {
    Workspace& w = workspace();
    Task<E> task(a, w, block, head);
    const int64_t padded = round_up(a.dim, LANES);
    std::fill(w.all.most, w.all.most + task.used, NEVER);
    std::fill(w.all.total, w.all.total + task.used, 0.0f);
    for (int64_t m = 0; m < task.used; ++m) std::fill_n(w.all.acc + m * MAX_DIM, padded, 0.0f);
    for (int64_t part = 0; part < block.num_parts; ++part) {
        task.attend(part);
        fold(w.all.most, w.all.total, w.all.acc, w.part.most, w.part.total, w.part.acc, MAX_DIM,
             task.used, a.dim);
    }
    finish(a, block, head, w.all.most, w.all.total, w.all.acc);
}

// Where the partial softmax of (head, part) of a block lies: most, total, acc [used][padded].
INLINE int64_t partial_size(const Arguments& a, const Block& block) {
    const int64_t used = block.rows * (a.num_heads / a.num_kv_heads);
    return used * (2 + round_up(a.dim, LANES));
}

template <typename E>
void one_part(const Arguments& a, const Block& block, int64_t head, int64_t part, float* out) {
    Workspace& w = workspace();
    Task<E> task(a, w, block, head);
    task.attend(part);
    const int64_t padded = round_up(a.dim, LANES);
    memcpy(out, w.part.most, task.used * 4);
    memcpy(out + task.used, w.part.total, task.used * 4);
    for (int64_t m = 0; m < task.used; ++m)
        memcpy(out + 2 * task.used + m * padded, w.part.acc + m * MAX_DIM, padded * 4);
}

void merge(const Arguments& a, const Block& block, int64_t head, const float* partials) {
    Workspace& w = workspace();
    const int64_t padded = round_up(a.dim, LANES);
    const int64_t used = block.rows * (a.num_heads / a.num_kv_heads);
    std::fill(w.all.most, w.all.most + used, NEVER);
    std::fill(w.all.total, w.all.total + used, 0.0f);
    for (int64_t m = 0; m < used; ++m) std::fill_n(w.all.acc + m * MAX_DIM, padded, 0.0f);
    for (int64_t part = 0; part < block.num_parts; ++part) {
        const float* p = partials + part * partial_size(a, block);
        fold(w.all.most, w.all.total, w.all.acc, p, p + used, p + 2 * used, padded, used, a.dim);
    }
    finish(a, block, head, w.all.most, w.all.total, w.all.acc);
}

template <typename E>
void run(const Arguments& a) {
    const int64_t groups = a.num_heads / a.num_kv_heads;
    const int64_t most_rows = std::max<int64_t>(1, MAX_LANES / groups);
    std::vector<Block> blocks;
    for (int64_t request = 0; request < a.num_requests; ++request) {
        const int64_t rows = a.cu_nodes[request + 1] - a.cu_nodes[request];
        for (int64_t first = 0; first < rows; first += most_rows) {
            Block block{request, first, std::min(most_rows, rows - first), 0, 0};
            int64_t deepest = 0;
            for (int64_t r = 0; r < block.rows; ++r)
                deepest = std::max<int64_t>(
                    deepest, a.depths[a.cu_nodes[request] + first + r]);
            block.num_parts = (a.committed[request] + deepest) / SPLIT + 1;
            blocks.push_back(block);
        }
    }
    const int64_t num_whole = (int64_t)blocks.size() * a.num_kv_heads;
    const int64_t threads = std::max<int64_t>(1, a.num_threads);
    if (threads == 1 || num_whole >= 4 * threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < num_whole; ++i)
            whole<E>(a, blocks[i / a.num_kv_heads], i % a.num_kv_heads);
        return;
    }
    struct Item { int64_t block, head, part; };
    std::vector<Item> items;
    int64_t size = 0;
    for (int64_t b = 0; b < (int64_t)blocks.size(); ++b) {
        blocks[b].partial = size;
        size += partial_size(a, blocks[b]) * blocks[b].num_parts * a.num_kv_heads;
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
            for (int64_t part = 0; part < blocks[b].num_parts; ++part)
                items.push_back({b, head, part});
    }
    thread_local std::vector<float> scratch;
    if ((int64_t)scratch.size() < size) scratch.resize(size);
    float* partials = scratch.data();
    const auto at = [&](const Block& block, int64_t head, int64_t part) {
        return partials + block.partial +
               (head * block.num_parts + part) * partial_size(a, block);
    };
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (int64_t)items.size(); ++i) {
            const Block& block = blocks[items[i].block];
            one_part<E>(a, block, items[i].head, items[i].part,
                           at(block, items[i].head, items[i].part));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_whole; ++i) {
            const Block& block = blocks[i / a.num_kv_heads];
            merge(a, block, i % a.num_kv_heads, at(block, i % a.num_kv_heads, 0));
        }
    }
}

}  // namespace

extern "C" void specdec_tree_attention(const Arguments* a) {
    switch (a->cache_type) {
        case 0: return run<Fp32>(*a);
        case 1: return run<Bf16>(*a);
        case 2: return run<Fp16>(*a);
        case 3: return run<Int8>(*a);
        default: return run<Fp8>(*a);
    }
}
