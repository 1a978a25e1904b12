// The KV cache of one sequence: locations of a token's key and value, and writing them.
#pragma once
#include "kernels.h"
#include "layout.h"

namespace edgespec {

constexpr int64_t kCommitted = -1;  // source of a move: that many tokens are committed, states may hold them

// Learned tables of coded keys, per layer and KV head: int4 scale and zero point [2][dim]; nomad centroids [dim /
// sub][sub][16].  Null for formats without tables.
struct CodeTables {
  const float* of[kKvNone] = {};

  static size_t floats(KvFormat format, int dim) {
    return format == kKvInt4 ? size_t(2) * dim : format == kKvNomad1 || format == kKvNomad2 ? size_t(dim) * 16 : 0;
  }
  const float* at(KvFormat format, const KvLayout& layout, int layer, int head) const {
    return of[format] + (size_t(layer) * layout.heads + head) * floats(format, layout.dim);
  }
};

class Cache {
 public:
  // A header, followed by blocks in order, or with a table by blocks at the table's numbers.
  Cache(uint8_t* header, const KvLayout& layout) : Cache(header, header + layout.header_bytes(), nullptr, layout) {}
  Cache(uint8_t* header, uint8_t* blocks, const int32_t* table, const KvLayout& layout)
      : base_(header), blocks_(blocks), table_(table), layout_(layout) {}

  uint8_t* keys(int64_t block, int layer, int head) const {
    const size_t number = table_ ? size_t(table_[block]) : size_t(block);
    return blocks_ + number * layout_.block_bytes() + layout_.layer_start(layer) + head * layout_.head_bytes(layer);
  }
  uint8_t* codes(int64_t block, int layer, int head) const {
    return keys(block, layer, head) + key_bytes(layout_.keys, layout_.dim_of(layer));
  }
  uint8_t* values(int64_t block, int layer, int head) const {
    return codes(block, layer, head) + key_bytes(layout_.codes, layout_.dim_of(layer));
  }
  // Exact keys [rows / 16][dim][16]: a tile for the first tokens, then the ring.
  uint16_t* recent(int layer, int head) const {
    return reinterpret_cast<uint16_t*>(base_ + layout_.states * layout_.state_bytes() +
                                       (size_t(layer) * layout_.heads + head) * layout_.recent_bytes());
  }
  // State of a token in a layer without attention, [state_width].
  float* state(int layer, int64_t token) const {
    return reinterpret_cast<float*>(base_ + layer * layout_.state_bytes()) + token % kStateRows * layout_.state_width;
  }

  // A delta rule's matrices, and how many tokens they hold.
  float* matrix(int layer) const { return state(layer, 0) + size_t(kStateRows) * layout_.state_width; }
  int64_t* applied(int layer) const { return reinterpret_cast<int64_t*>(matrix(layer) + layout_.state_matrix); }

  // Write a token's key and value [dim], zero beyond head_dim.
  void append(const Kernels& k, const CodeTables& tables, int layer, int head, int64_t token, const float* key,
              const float* value) const;
  // Copy what is kept of one token to another place, in all layers.
  void move(int64_t from, int64_t to) const;
  // Copy values of heads of a size from block to block: of one token, and of tokens [first, end) to the same indices;
  // first is a multiple of 4, and up to 3 tokens after them are overwritten.
  void move_value(int dim, const uint8_t* from, int a, uint8_t* to, int b) const;
  void copy_values(int dim, const uint8_t* from, int first, int end, uint8_t* to) const;

 private:
  void put_key(const Kernels& k, KvFormat format, uint8_t* block, int dim, const float* table, int token,
               const float* key) const;
  void put_value(const Kernels& k, uint8_t* block, int dim, int token, const float* value) const;
  void move_key(KvFormat format, int dim, const uint8_t* from, int a, uint8_t* to, int b) const;

  uint8_t *base_, *blocks_;
  const int32_t* table_;
  const KvLayout& layout_;
};

}  // namespace edgespec
