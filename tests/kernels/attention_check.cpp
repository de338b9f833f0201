// Attention of this build's best instruction set against plain C++, on random requests: for machines without Python.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "attention.h"
#include "qkv.h"

using namespace maitred;

namespace {

std::vector<float> run(Isa isa, DType dtype, int num_heads, int num_kv_heads, int head_dim, int window, float softcap,
                       bool sinks, int block_size, int latent = 0) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  ThreadPool threads(2);
  const std::vector<int> starts{270, 0, 17}, counts{1, 40, 3};
  KVPool pool(kv_layout(dtype, num_kv_heads, head_dim, block_size, latent), 1, 400);
  std::vector<float> frequencies(head_dim / 2, 0.1f), logits(num_heads, 0.5f);
  const int width = (num_heads + (latent > 0 ? 1 : 2) * num_kv_heads) * head_dim;
  const int out_width = num_heads * (latent > 0 ? latent : head_dim);
  std::vector<float> out;
  // First everything before the step, request by request, then the step itself.
  for (int part = 0; part < 2; ++part) {
    std::vector<int32_t> positions, first_tokens{0}, tables, first_blocks{0};
    int block = 0;
    for (std::size_t r = 0; r < starts.size(); ++r) {
      const int from = part == 0 ? 0 : starts[r], to = part == 0 ? starts[r] : starts[r] + counts[r];
      for (int p = from; p < to; ++p) positions.push_back(p);
      for (int p = 0; p < starts[r] + counts[r]; p += block_size) tables.push_back(block++);
      first_tokens.push_back(static_cast<int32_t>(positions.size()));
      first_blocks.push_back(static_cast<int32_t>(tables.size()));
    }
    const int tokens = static_cast<int>(positions.size());
    const StepRows step{tokens,
                        static_cast<int>(starts.size()),
                        0,
                        nullptr,
                        positions.data(),
                        first_tokens.data(),
                        tables.data(),
                        first_blocks.data(),
                        nullptr};
    std::vector<float> rows(static_cast<std::size_t>(tokens) * width);
    for (float& x : rows) x = normal(random);
    std::vector<float> table(static_cast<std::size_t>(tokens) * head_dim);
    std::vector<uint8_t> queries(static_cast<std::size_t>(tokens) * num_heads * query_head_bytes(pool.layout()));
    out.assign(static_cast<std::size_t>(tokens) * out_width, 0.0f);
    AttentionPlan plan(pool.layout(), num_heads, window, false, 2);
    plan.build(step);
    AttentionScratch scratch(pool.layout(), 2);
    WorkCounter counters[3];
    const RopeOp rope{frequencies.data(), head_dim / 2, 1.0f};
    const QKVOp op{0, 0, num_heads, QKNorm::none, nullptr, nullptr, 1e-6f, head_dim / 2};
    const AttentionOp attend{
        0, 0, num_heads, 1.0f / std::sqrt(static_cast<float>(head_dim)), softcap, sinks ? logits.data() : nullptr};
    threads.run([&](const Worker& worker) {
      rope_table(rope, step, table.data(), counters[0], worker);
      worker.meet();
      qkv(op, pool, step, rows.data(), width, table.data(), table.data(), queries.data(), counters[1], worker, isa);
      worker.meet();
      attention(attend, plan, scratch, pool, step, queries.data(), out.data(), out_width, counters[2], worker, isa);
    });
  }
  return out;
}

}  // namespace

int main() {
  const Isa isa = available_isas().back();
  int failures = 0, checks = 0;
  const auto check = [&](DType dtype, int heads, int kv_heads, int head_dim, int window, int block_size, int latent) {
    const float softcap = head_dim == 26 ? 5.0f : 0.0f;
    const bool sinks = window != 0;
    const auto want = run(Isa::plain, dtype, heads, kv_heads, head_dim, window, softcap, sinks, block_size, latent);
    const auto got = run(isa, dtype, heads, kv_heads, head_dim, window, softcap, sinks, block_size, latent);
    float worst = 0.0f;
    for (std::size_t i = 0; i < want.size(); ++i)
      worst = std::fabs(want[i] - got[i]) <= worst ? worst : std::fabs(want[i] - got[i]);
    const float limit = dtype == DType::f32 ? 1e-5f : dtype == DType::bf16 ? 2e-2f : 1e-3f;
    ++checks;
    if (worst <= limit) return;
    ++failures;
    std::printf("%s dtype %d head %d heads %d window %d block %d latent %d: off by %g\n", isa_name(isa),
                static_cast<int>(dtype), head_dim, heads, window, block_size, latent, static_cast<double>(worst));
  };
  for (DType dtype : {DType::f32, DType::bf16, DType::int8, DType::q4_1})
    for (int head_dim : {26, 64, 80})
      for (int group : {1, 3, 6})
        for (int window : {0, 40})
          for (int block_size : {16, 5}) check(dtype, 2 * group, 2, head_dim, window, block_size, 0);
  for (DType dtype : {DType::f32, DType::bf16})
    for (int latent : {26, 64, 80})
      for (int block_size : {16, 5}) check(dtype, 5, 1, 96, 0, block_size, latent);
  std::printf("attention: %s checked against plain, %d of %d cases agree\n", isa_name(isa), checks - failures, checks);
  return failures != 0;
}
