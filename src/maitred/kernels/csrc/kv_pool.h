// The paged KV pool: where keys and values of a token lie, allocation, and copies of whole blocks.
//
// The pool is [layers][blocks][block of a layer]; a block of a layer is contiguous. The layout serves the arithmetic,
// so that a vector load is what a dot product takes, and memory, which is fastest when read in long runs:
//
// - block_size a multiple of 16 ("tiled"): a block is K of all heads, then V of all heads, each [tile of 16
// slots][head]
//   of cells. A cell is words of 4 bytes that hold 1 (float32), 2 (bf16) or 4 (int8) values: K [word of the head][16
//   slots], consecutive values of one slot in a word; V [16 / values per word][head, padded to 16 values], consecutive
//   slots of one value in a word. K's cell has room for a padded head too, so that V lies at one distance from K. int8
//   has the 16 slots' float32 scales behind each cell. int8 keys are stored with 128 added (unsigned).
// - any other block_size: a block is [head][slot] of cells, each K [head], V [head] and for int8 two scales; attention
//   gathers them into tiles as it goes. No memory is lost to padding, but speed is.
//
// A latent pool (float32, bf16) has K alone: the last value_dim values of a key are the value too, and K's cells are as
// long as their words. Attention turns a tile's values into V's form as it goes.
//
// int4 (DType::q4_1) is of such cells at every block_size: codes of K and V, two in a byte, then scale and minimum in
// bf16 of each 32 values. Attention expands them into int8's tiles; qkv_run.h has the arithmetic.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "team.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

constexpr int kTileSlots = 16;

struct KVLayout {
  DType dtype;
  int num_kv_heads;
  int head_dim;
  int value_dim;  // of a value: head_dim, or less in a latent pool
  int block_size;
  int values_per_word;  // in 4 bytes
  int padded_head;      // value_dim rounded up to 16
  int k_words;          // words of a key: a tile's K has this many lines of 64 bytes
  bool tiled;
  bool latent;
  int64_t cell_bytes;   // K or V of a tile, or K and V of a slot where not tiled
  int64_t v_offset;     // of V behind K's cell, or behind K in a slot
  int64_t head_stride;  // from one head's cell to the next head's
  int64_t block_bytes;  // one block of one layer

  bool is_integer() const { return dtype == DType::int8 || dtype == DType::q4_1; }       // heads are rotated
  int64_t scales_offset() const { return int64_t{padded_head} * 64 / values_per_word; }  // bytes of a tile's V; int8
};

constexpr int kCodeGroup = 32;  // values of a head that share scale and minimum (int4)

// latent_dim: values of a key that are the value too, 0 for a pool that is not latent. Throws std::invalid_argument for
// other formats, an odd or non-positive head size, and counts below 1.
KVLayout kv_layout(DType dtype, int num_kv_heads, int head_dim, int block_size, int latent_dim = 0);

// Bytes of one token's query head as attention takes it: see qkv.h.
int64_t query_head_bytes(const KVLayout& layout);

// Of them, for an int8 or int4 pool, those of the high or of the low parts of its values. Static: each file has its own
// copy.
static inline int64_t int8_part(const KVLayout& layout) { return (int64_t{layout.k_words} * 4 + 63) / 64 * 64; }

// Zeroed memory of the operating system, given when first touched: in huge pages where it has them, or in small ones
// if it `is_sparse`, touched here and there.
class Pages {
 public:
  // shared: of it, for as long as it is mapped, instead of memory of this process alone. Throws std::bad_alloc.
  explicit Pages(int64_t num_bytes, SharedMemory* shared = nullptr, bool is_sparse = false);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  uint8_t* begin() const { return begin_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  uint8_t* begin_;
  int64_t num_bytes_;
};

// How far the computing has come, for who reads the pool from a thread of its own beside a step.
struct KVProgress {
  int64_t num_runs;  // of the program that have begun
  int num_layers;    // whose keys and values the last of them has written
};

// Where a layer lies in a pool of pages of unlike layers: of what layout, and how far from a page's beginning. Layers
// of different groups may lie at one place.
struct KVPlace {
  KVLayout layout;
  int64_t offset;
};

class KVPool {
 public:
  // Throws std::invalid_argument for counts below 1, std::bad_alloc when the address space is refused.
  KVPool(const KVLayout& layout, int num_layers, int num_blocks, SharedMemory* shared = nullptr);

  // One layer of pages, `layout` without the size of a block, that hold layers at these places.
  KVPool(KVLayout layout, int64_t page_bytes, std::vector<KVPlace> places, int num_blocks, SharedMemory* shared);

  const KVLayout& layout() const { return layout_; }
  // Of one of the model's layers, which are those of the pool unless they have places in its pages.
  const KVLayout& layout_of(int layer) const {
    return places_.empty() ? layout_ : places_[static_cast<size_t>(layer)].layout;
  }
  uint8_t* block_of(int layer, int index) const {
    return places_.empty() ? block(layer, index) : block(0, index) + places_[static_cast<size_t>(layer)].offset;
  }
  int num_model_layers() const { return places_.empty() ? num_layers_ : static_cast<int>(places_.size()); }
  int num_layers() const { return num_layers_; }
  int num_blocks() const { return num_blocks_; }
  int64_t num_bytes() const { return pages_.num_bytes(); }
  int64_t bytes_per_block() const { return num_layers_ * layout_.block_bytes; }  // over all layers
  // Of a layer, that the system gives at once: a huge page, or less where that were much of what the layer has.
  int64_t grain_bytes() const;

  uint8_t* block(int layer, int block) const {
    return pages_.begin() + (int64_t{layer} * num_blocks_ + block) * layout_.block_bytes;
  }

  // Have the operating system give all pages now, each thread its part, without changing what they hold.
  void touch(ThreadPool& threads);
  // All layers of `source` over `target`. Throws std::out_of_range for a block that is not there.
  void copy_block(int source, int target);
  // All layers of a block to or from `bytes_per_block()` contiguous bytes, layer by layer.
  void read_block(int block, uint8_t* bytes) const;
  void write_block(int block, const uint8_t* bytes);
  void check_block(int block) const;

  // Layers [first, first + count) of each of `blocks`, layer by layer, to or from contiguous bytes: of one thread,
  // which may run beside a step that leaves those blocks alone. Throws std::out_of_range.
  void read_part(int first, int count, const std::vector<int>& blocks, uint8_t* bytes) const;
  void write_part(int first, int count, const std::vector<int>& blocks, const uint8_t* bytes);

  // Called by the program, which has one step at a time.
  void begin_run() { progress_.store(((progress_ >> kLayerBits) + 1) << kLayerBits, std::memory_order_release); }
  void wrote_layer() { progress_.fetch_add(1, std::memory_order_release); }
  // What it tells as written may be read.
  KVProgress progress() const {
    const int64_t both = progress_.load(std::memory_order_acquire);
    return {both >> kLayerBits, static_cast<int>(both & ((1 << kLayerBits) - 1))};
  }

 private:
  static constexpr int kLayerBits = 16;
  void check_part(int first, int count, const std::vector<int>& blocks) const;

  KVLayout layout_;
  std::vector<KVPlace> places_;
  int num_layers_;
  int num_blocks_;
  Pages pages_;
  std::atomic<int64_t> progress_{0};  // runs, and in the low bits layers
};

}  // namespace maitred
