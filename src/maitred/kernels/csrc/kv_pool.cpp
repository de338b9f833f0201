#include "kv_pool.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace maitred {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPage = 4096;
constexpr int64_t kSmallGrain = 128 << 10;
constexpr int64_t kManyHugePages = 8;  // of a layer: from there on an unused part of one is little

int64_t grain_of(int64_t layer_bytes) { return layer_bytes < kManyHugePages * kHugePage ? kSmallGrain : kHugePage; }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

KVLayout kv_layout(DType dtype, int num_kv_heads, int head_dim, int block_size, int latent_dim) {
  const bool coded = dtype == DType::q4_1;
  if (dtype > DType::int8 && !coded) throw std::invalid_argument("the KV cache is float32, bf16, int8 or int4");
  if (num_kv_heads < 1 || block_size < 1)
    throw std::invalid_argument("a KV cache of " + std::to_string(num_kv_heads) + " heads and blocks of " +
                                std::to_string(block_size) + " tokens; both must be at least 1");
  if (head_dim < 2 || head_dim % 2 != 0)
    throw std::invalid_argument("a head size of " + std::to_string(head_dim) + "; it must be even and at least 2");
  if (latent_dim < 0 || latent_dim > head_dim || latent_dim % 2 != 0 || (latent_dim > 0 && dtype > DType::bf16))
    throw std::invalid_argument("a KV cache of latent keys is float32 or bf16, and of " + std::to_string(head_dim) +
                                " values an even number are the value; asked for are " + std::to_string(latent_dim));
  KVLayout layout{};
  layout.latent = latent_dim > 0;
  layout.value_dim = layout.latent ? latent_dim : head_dim;
  layout.dtype = dtype;
  layout.num_kv_heads = num_kv_heads;
  layout.head_dim = head_dim;
  layout.block_size = block_size;
  layout.values_per_word = dtype == DType::f32 ? 1 : dtype == DType::bf16 ? 2 : 4;
  layout.padded_head = static_cast<int>(round_up(layout.value_dim, 16));
  layout.k_words = (head_dim + layout.values_per_word - 1) / layout.values_per_word;
  layout.tiled = block_size % kTileSlots == 0 && !coded;
  const int64_t value_bytes = 4 / layout.values_per_word;
  const bool scaled = dtype == DType::int8;
  if (layout.latent) {  // as K is otherwise; v_offset stays 0
    layout.cell_bytes = layout.tiled ? int64_t{layout.k_words} * 64 : round_up(head_dim * value_bytes, 4);
    layout.head_stride = layout.tiled ? layout.cell_bytes : block_size * layout.cell_bytes;
    layout.block_bytes = round_up(block_size / (layout.tiled ? kTileSlots : 1) * num_kv_heads * layout.cell_bytes, 64);
  } else if (layout.tiled) {
    layout.cell_bytes = layout.scales_offset() + (scaled ? kTileSlots * int64_t{sizeof(float)} : 0);
    layout.head_stride = layout.cell_bytes;
    layout.v_offset = block_size / kTileSlots * num_kv_heads * layout.cell_bytes;
    layout.block_bytes = 2 * layout.v_offset;
  } else if (coded) {
    const int64_t groups = round_up(head_dim, kCodeGroup) / kCodeGroup;
    layout.cell_bytes = round_up(head_dim + 2 * groups * int64_t{sizeof(uint32_t)}, 4);
    layout.head_stride = block_size * layout.cell_bytes;
    layout.v_offset = head_dim / 2;
    layout.block_bytes = round_up(num_kv_heads * layout.head_stride, 64);
  } else {
    layout.cell_bytes = round_up(2 * head_dim * value_bytes, 4) + (scaled ? 2 * int64_t{sizeof(float)} : 0);
    layout.head_stride = block_size * layout.cell_bytes;
    layout.v_offset = head_dim * value_bytes;
    layout.block_bytes = round_up(num_kv_heads * layout.head_stride, 64);
  }
  return layout;
}

int64_t query_head_bytes(const KVLayout& layout) {
  const int64_t part = int8_part(layout);
  return layout.is_integer() ? 2 * part + 64 : part;
}

Pages::Pages(int64_t num_bytes, SharedMemory* shared, bool is_sparse) : num_bytes_(num_bytes) {
  if (shared != nullptr) {
    begin_ = shared->take(num_bytes);
    return;
  }
  const bool huge = num_bytes >= kHugePage;
  mapped_bytes_ =
      static_cast<std::size_t>(huge ? round_up(num_bytes, kHugePage) + kHugePage : round_up(num_bytes, kPage));
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<uint8_t*>(mapped_);
  if (!huge) return;
  begin_ = reinterpret_cast<uint8_t*>(round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped_)), kHugePage));
#if defined(MADV_HUGEPAGE)
  const auto whole = static_cast<std::size_t>(round_up(num_bytes, kHugePage));
  madvise(begin_, whole, is_sparse ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);  // any pages work
#endif
}

Pages::~Pages() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

KVPool::KVPool(const KVLayout& layout, int num_layers, int num_blocks, SharedMemory* shared)
    : layout_(layout),
      num_layers_(num_layers),
      num_blocks_(num_blocks),
      pages_(num_layers < 1 || num_blocks < 1
                 ? throw std::invalid_argument("a KV pool of " + std::to_string(num_layers) + " layers and " +
                                               std::to_string(num_blocks) + " blocks; both must be at least 1")
                 : num_layers * int64_t{num_blocks} * layout.block_bytes,
             shared, grain_of(num_blocks * layout.block_bytes) < kHugePage) {}

KVPool::KVPool(KVLayout layout, int64_t page_bytes, std::vector<KVPlace> places, int num_blocks, SharedMemory* shared)
    : KVPool((layout.block_bytes = page_bytes, layout), 1, num_blocks, shared) {
  for (const KVPlace& place : places)
    if (place.offset < 0 || place.offset % 64 != 0 || place.offset + place.layout.block_bytes > page_bytes)
      throw std::invalid_argument("a layer's block at byte " + std::to_string(place.offset) + " of a page of " +
                                  std::to_string(page_bytes));
  places_ = std::move(places);
}

int64_t KVPool::grain_bytes() const { return grain_of(num_blocks_ * layout_.block_bytes); }

void KVPool::touch(ThreadPool& threads) {
  WorkCounter counter;
  threads.run([&](const Worker&) {
    for (int64_t first; (first = counter.take() * kHugePage) < num_bytes();) {
      const int64_t end = first + kHugePage < num_bytes() ? first + kHugePage : num_bytes();
      for (int64_t at = first; at < end; at += kPage) {
        volatile uint8_t* byte = pages_.begin() + at;
        *byte = *byte;
      }
    }
  });
}

void KVPool::check_block(int block) const {
  if (block < 0 || block >= num_blocks_)
    throw std::out_of_range("block " + std::to_string(block) + " of a KV pool of " + std::to_string(num_blocks_));
}

void KVPool::copy_block(int source, int target) {
  check_block(source);
  check_block(target);
  if (source == target) return;
  for (int layer = 0; layer < num_layers_; ++layer)
    std::memcpy(block(layer, target), block(layer, source), static_cast<std::size_t>(layout_.block_bytes));
}

void KVPool::read_block(int index, uint8_t* bytes) const {
  check_block(index);
  for (int layer = 0; layer < num_layers_; ++layer, bytes += layout_.block_bytes)
    std::memcpy(bytes, block(layer, index), static_cast<std::size_t>(layout_.block_bytes));
}

void KVPool::write_block(int index, const uint8_t* bytes) {
  check_block(index);
  for (int layer = 0; layer < num_layers_; ++layer, bytes += layout_.block_bytes)
    std::memcpy(block(layer, index), bytes, static_cast<std::size_t>(layout_.block_bytes));
}

void KVPool::check_part(int first, int count, const std::vector<int>& blocks) const {
  if (first < 0 || count < 0 || first > num_layers_ - count)
    throw std::out_of_range(std::to_string(count) + " layers from " + std::to_string(first) + " of a KV pool of " +
                            std::to_string(num_layers_));
  for (int index : blocks) check_block(index);
}

void KVPool::read_part(int first, int count, const std::vector<int>& blocks, uint8_t* bytes) const {
  check_part(first, count, blocks);
  for (int layer = first; layer < first + count; ++layer)
    for (int index : blocks) {
      std::memcpy(bytes, block(layer, index), static_cast<std::size_t>(layout_.block_bytes));
      bytes += layout_.block_bytes;
    }
}

void KVPool::write_part(int first, int count, const std::vector<int>& blocks, const uint8_t* bytes) {
  check_part(first, count, blocks);
  for (int layer = first; layer < first + count; ++layer)
    for (int index : blocks) {
      std::memcpy(block(layer, index), bytes, static_cast<std::size_t>(layout_.block_bytes));
      bytes += layout_.block_bytes;
    }
}

}  // namespace maitred
