// maitred.kernels._native.Program: Python adds the operations, one by one, then runs steps.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "chain.h"
#include "experts.h"
#include "program.h"
#include "program_ops.h"
#include "recurrent.h"
#include "rotate.h"

namespace nb = nanobind;

namespace maitred {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutInts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ChainSettings = nb::ndarray<const double, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Sequences = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>, nb::device::cpu>;
using SharedBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::device::cpu>;
using View = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::device::cpu>;

struct RopeTable {
  float* table;
  int num_pairs;
};

// A program and what its operations share. Weights are the caller's, who keeps them as long as the program.
struct BoundProgram {
  BoundProgram(ThreadPool& threads, KVPool& pool, const std::string& isa, int max_tokens, int max_logits,
               int vocab_size, int max_positions, Team* team)
      : program(threads, pool, Program::Limits{max_tokens, max_logits, vocab_size, max_positions}, isa_named(isa),
                team),
        adapters(std::max(max_tokens, max_logits), program.num_threads(), program.isa(), team),
        first_touch(pool, program.num_threads()),
        threads(&threads) {
    if (max_tokens < 1 || max_logits < 1) throw std::invalid_argument("a program for steps without tokens or logits");
    program.add_check([this](const StepRows& step) { slots.check(step); });
    program.add_planner([this](const StepRows& step) { adapters.plan(step); });
    add_first_touch(program, first_touch);
    program.add_logits_planner([this](const StepRows& step) { adapters.plan_logits(step); });
  }
  // linear: as adapted_linear numbers them, -1 for one that adapters leave alone.
  AdaptedLinear adapted(int linear, int first_tile = 0) {
    return AdaptedLinear{linear < 0 ? nullptr : &adapters, linear, first_tile};
  }
  const OperandBuffers& operands() const {
    if (operand_buffers == nullptr) throw std::logic_error("operands come before the operations that use them");
    return *operand_buffers;
  }

  ExpertBuffers& experts() const {
    if (expert_buffers == nullptr) throw std::logic_error("room for experts comes before the operations that use it");
    return *expert_buffers;
  }

  // One plan for each window and kind of heads, built before each step.
  AttentionPlan& plan(const KVLayout& layout, int num_heads, int window) {
    std::unique_ptr<AttentionPlan>& plan = plans[{num_heads, window, layout.num_kv_heads, layout.head_dim}];
    if (plan == nullptr) {
      plan = std::make_unique<AttentionPlan>(layout, num_heads, window, encodes, program.num_threads());
      if (program.team() != nullptr)
        plan->share(program.team()->memory(), program.limits().max_tokens, program.limits().max_positions);
      program.add_planner([&made = *plan](const StepRows& step) { made.build(step); });
    }
    return *plan;
  }
  const AttentionScratch& scratch(const KVLayout& layout) {
    std::unique_ptr<AttentionScratch>& scratch = scratches[{layout.num_kv_heads, layout.head_dim}];
    if (scratch == nullptr) scratch = std::make_unique<AttentionScratch>(layout, program.num_threads());
    return *scratch;
  }

  Program program;
  Adapters adapters;
  FirstTouch first_touch;
  std::unique_ptr<OperandBuffers> operand_buffers;
  std::unique_ptr<ExpertBuffers> expert_buffers;           // where a layer is routed
  std::vector<std::pair<int64_t*, int>> tokens_of_expert;  // of each routed layer, and their number
  std::map<std::array<int, 4>, std::unique_ptr<AttentionPlan>> plans;
  std::map<std::pair<int, int>, std::unique_ptr<AttentionScratch>> scratches;
  ThreadPool* threads;
  StateSlots slots;
  bool encodes = false;  // each token sees all of its request
  uint8_t* queries = nullptr;
  int64_t query_bytes = 0;
  std::shared_ptr<HalfRows> half_written, half_read;  // by the last linear, and by those behind the last prepare
  const float* rotated = nullptr;                     // rows that the last attention left rotated
};

PackedLinear packed(const LinearShape& shape, const Bytes& data) {
  if (static_cast<int64_t>(data.size()) < packed_bytes(shape) || reinterpret_cast<uintptr_t>(data.data()) % 64 != 0)
    throw std::invalid_argument("packed weights of " + std::to_string(data.size()) + " bytes; needed are " +
                                std::to_string(packed_bytes(shape)) + ", aligned to 64");
  return PackedLinear{shape, data.data()};
}

const float* vector_of(const nb::object& vector, int64_t width) {
  if (vector.is_none()) return nullptr;
  const Vector values = nb::cast<Vector>(vector);
  if (static_cast<int64_t>(values.size()) != width)
    throw std::invalid_argument("a vector has " + std::to_string(values.size()) + " values where " +
                                std::to_string(width) + " are needed");
  return values.data();
}

void check_width(const Rows& rows, int64_t width) {
  if (rows.width == width) return;
  throw std::invalid_argument("rows of " + std::to_string(rows.width) + " values where " + std::to_string(width) +
                              " are needed");
}

Ending ending_named(const std::string& name) {
  if (name == "store") return Ending::store;
  if (name == "add") return Ending::add;
  if (name == "gate") return Ending::gate;
  if (name == "act") return Ending::act;
  throw std::invalid_argument("no ending '" + name + "'; choose one of store, add, gate, act");
}

GateAct act_named(const std::string& name) {
  if (name == "silu") return GateAct::silu;
  if (name == "gelu") return GateAct::gelu;
  if (name == "gelu_tanh") return GateAct::gelu_tanh;
  if (name == "clamped_swiglu") return GateAct::clamped_swiglu;
  throw std::invalid_argument("no activation '" + name + "'; choose one of silu, gelu, gelu_tanh, clamped_swiglu");
}

void linear(BoundProgram& self, const LinearShape& shape, const Bytes& data, const Rows& target, int column, int first,
            const std::string& ending, float alpha, float softcap, const std::string& act, bool few, int adapted,
            const std::string& name) {
  const int end = column + first + out_width(shape);
  if (column < 0 || first < 0 || end > target.width) check_width(target, end);
  LinearOut out{target.values + column + first, target.stride};
  out.ending = ending_named(ending);
  out.alpha = alpha;
  out.softcap = softcap;
  out.act = act_named(act);
  const bool halves = (out.ending == Ending::gate || out.ending == Ending::act) && self.program.team() == nullptr &&
                      column + first == 0 && end == target.width && end % 128 == 0;
  self.half_written = halves ? std::make_shared<HalfRows>() : nullptr;
  if (halves) *self.half_written = {target, self.program.ops().size() + 1, few, false, {}};
  add_linear(self.program, self.operands(), packed(shape, data), out, few,
             self.adapted(adapted, first / (shape.gated ? kTile / 2 : kTile)), name, self.half_read, self.half_written);
}

void head_linear(BoundProgram& self, const LinearShape& shape, const Bytes& data, int first, int count, int copied,
                 const Rows& source, const Rows& target, bool few, bool taken, const std::string& name) {
  if (static_cast<int64_t>(data.size()) < count * packed_bytes(shape) || first < 0 || copied < 0 || shape.gated)
    throw std::invalid_argument(std::to_string(count) + " heads' matrices in " + std::to_string(data.size()) +
                                " bytes");
  const int64_t end = first + count;
  source.columns(0, end * (shape.k + copied));
  target.columns(0, end * (copied + out_width(shape)));
  add_head_linear(self.program, self.operands(), {shape, packed(shape, data).data, first, count, copied}, source,
                  target, few, taken, name);
}

PackedExperts packed_experts(const LinearShape& shape, const Bytes& data, int num_experts) {
  if (static_cast<int64_t>(data.size()) < num_experts * packed_bytes(shape))
    throw std::invalid_argument(std::to_string(num_experts) + " experts in " + std::to_string(data.size()) + " bytes");
  return PackedExperts{shape, packed(shape, data).data};
}

void route(BoundProgram& self, const Rows& logits, const std::string& scoring, int num_experts, int num_active,
           int num_groups, int num_active_groups, int best_of_group, bool normalized, float scale,
           const nb::object& correction, bool few, const nb::object& expert_scales) {
  const Scoring rule = scoring == "sigmoid"             ? Scoring::sigmoid
                       : scoring == "softmax_of_chosen" ? Scoring::softmax_of_chosen
                                                        : Scoring::softmax;
  if (rule == Scoring::softmax && scoring != "softmax") throw std::invalid_argument("no scoring '" + scoring + "'");
  if (logits.width < num_experts) check_width(logits, num_experts);
  const RouteOp op{rule,
                   num_experts,
                   num_active,
                   num_groups,
                   num_active_groups,
                   best_of_group,
                   normalized,
                   scale,
                   vector_of(correction, num_experts),
                   vector_of(expert_scales, num_experts)};
  self.experts().check(op);
  add_route(self.program, op, self.experts(), logits, few);
}

void experts(BoundProgram& self, int num_experts, int num_active, int width, const LinearShape& gate_up,
             const Bytes& gate_up_data, int first_inner, const LinearShape& down, const Bytes& down_data, int first_out,
             const Rows& target, const std::string& ending, float alpha, const std::string& act, float act_alpha,
             float act_limit, bool few, const std::string& name) {
  ExpertsOp op{packed_experts(gate_up, gate_up_data, num_experts),
               packed_experts(down, down_data, num_experts),
               first_inner,
               first_out,
               width,
               LinearOut{nullptr, 0},
               ending_named(ending),
               alpha,
               few};
  op.gated.act = act_named(act);
  op.gated.alpha = act_alpha;
  op.gated.softcap = act_limit;
  self.experts().check(op, num_active, target.width);
  int64_t* tokens = static_cast<int64_t*>(self.program.add_own_bytes(num_experts * int64_t{sizeof(int64_t)}));
  self.tokens_of_expert.emplace_back(tokens, num_experts);
  add_experts(self.program, op, num_active, self.experts(), self.operands(), target, tokens, name);
}

RopeTable make_rope_table(BoundProgram& self, const Vector& frequencies, float factor, float query_beta,
                          int query_context) {
  const int num_pairs = static_cast<int>(frequencies.size());
  if (query_context < 1) throw std::invalid_argument("a rope for a context of no tokens");
  float* table = self.program.add_rows(self.program.limits().max_tokens, 2 * num_pairs);
  add_rope_table(self.program, RopeOp{frequencies.data(), num_pairs, factor, query_beta, query_context}, table);
  return RopeTable{table, num_pairs};
}

void qkv_op(BoundProgram& self, int layer, int num_heads, const Rows& source, const RopeTable* rope,
            const nb::object& q_norm, const nb::object& k_norm, bool full_width, float eps, bool interleaved,
            const RopeTable* query_rope, bool queries_only) {
  const Program::LayerPlace place = self.program.place(layer);
  const KVLayout& layout = self.program.pool().layout_of(place.layer);
  const int64_t head = layout.head_dim;
  source.columns(0, (num_heads + (queries_only ? 0 : layout.latent ? 1 : 2) * layout.num_kv_heads) * head);
  QKVOp op{};
  op.layer = place.layer;
  op.group = place.group;
  op.num_heads = num_heads;
  op.norm = q_norm.is_none() ? QKNorm::none : full_width ? QKNorm::full_width : QKNorm::per_head;
  op.q_norm = vector_of(q_norm, full_width ? num_heads * head : head);
  op.k_norm = vector_of(k_norm, full_width ? layout.num_kv_heads * head : head);
  op.eps = eps;
  op.num_pairs = rope == nullptr ? 0 : rope->num_pairs;
  op.interleaved = interleaved;
  op.queries_only = queries_only;
  if (interleaved && op.norm != QKNorm::none) throw std::invalid_argument("norms of heads with interleaved pairs");
  const int64_t query_bytes = self.program.limits().max_tokens * num_heads * query_head_bytes(layout);
  if (query_bytes > self.query_bytes)
    self.queries = static_cast<uint8_t*>(self.program.add_bytes(self.query_bytes = query_bytes));
  const RopeTable* of_queries = query_rope == nullptr ? rope : query_rope;
  add_qkv(self.program, queries_only ? -1 : layer, op, source, rope == nullptr ? nullptr : rope->table,
          rope == nullptr ? nullptr : of_queries->table, self.queries);
}

// Where an int8 linear reads what an int8 or int4 pool's values became, both would rotate it by the same blocks, and
// neither does.
bool stays_rotated(const KVLayout& layout, const LinearShape& reader) {
  return layout.is_integer() && reader.dtype == DType::int8 &&
         rotation_block(layout.head_dim) == rotation_block(reader.k);
}

void attention_op(BoundProgram& self, int layer, int num_heads, int window, float scale, float softcap,
                  const Rows& target, const LinearShape& reader, const nb::object& sinks, const Rows* gates) {
  if (!(scale > 0.0f)) throw std::invalid_argument("a scale of " + std::to_string(scale) + "; it must be positive");
  const Program::LayerPlace place = self.program.place(layer);
  const KVLayout& layout = self.program.pool().layout_of(place.layer);
  check_width(target, int64_t{num_heads} * layout.value_dim);
  const bool rotated = gates == nullptr && stays_rotated(layout, reader);
  self.rotated = rotated ? target.values : nullptr;
  if (self.queries == nullptr) throw std::logic_error("attention before queries");
  AttentionPlan& plan = self.plan(layout, num_heads, window);
  add_attention(self.program,
                AttentionOp{place.layer, place.group, num_heads, scale, softcap, vector_of(sinks, num_heads), rotated},
                plan, self.scratch(layout), self.queries, target);
  if (gates != nullptr)
    add_open(self.program, gates->columns((num_heads + 2 * layout.num_kv_heads) * layout.head_dim, target.width),
             target);
}

using States = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

void recurrent_op(BoundProgram& self, const Rows& source, const Rows& target, int key_heads, int value_heads,
                  int key_dim, int value_dim, int conv_width, bool tiled, const Vector& conv, const Vector& step_bias,
                  const Vector& rate, const Vector& norm, float eps) {
  if (std::min({key_heads, key_dim, value_dim, conv_width - 1}) < 1 || value_heads < 1 ||
      value_heads % key_heads != 0 || conv_width > kMostTaps)
    throw std::invalid_argument("a recurrent layer of sizes that cannot be");
  RecurrentOp op{key_heads,
                 value_heads,
                 key_dim,
                 value_dim,
                 conv_width,
                 tiled,
                 nullptr,
                 vector_of(nb::cast(step_bias), value_heads),
                 vector_of(nb::cast(rate), value_heads),
                 vector_of(nb::cast(norm), value_dim),
                 eps,
                 static_cast<int>(self.slots.layers.size())};
  const int64_t channels = op.channels();
  check_width(source, op.input_width());
  check_width(target, int64_t{value_heads} * value_dim);
  if (static_cast<int64_t>(conv.size()) != channels * conv_width)
    throw std::invalid_argument("a convolution of other sizes than its layer");
  float* const by_tap =
      static_cast<float*>(self.program.add_own_bytes(channels * conv_width * static_cast<int64_t>(sizeof(float))));
  for (int64_t channel = 0; channel < channels; ++channel)
    for (int w = 0; w < conv_width; ++w) by_tap[w * channels + channel] = conv.data()[channel * conv_width + w];
  op.conv = by_tap;
  const int64_t stride = (op.state_floats(self.slots.num_pending) + 15) / 16 * 16;
  self.slots.layers.push_back({self.program.add_rows(self.slots.num_slots, stride), stride});
  add_recurrent(self.program, op, self.slots, source, target);
}

using Runs = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using AdapterPart =
    std::tuple<std::string, int, Bytes, Bytes, Runs>;  // format, rank, A, B, (panels, first rank, ranks)

LowRank low_rank_of(const AdapterPart& from) {
  const auto& [dtype, rank, a, b, runs] = from;
  if (dtype != "float32" && dtype != "bfloat16") throw std::invalid_argument("an adapter in " + dtype);
  LowRank part{dtype == "float32" ? DType::f32 : DType::bf16, rank, a.data(), b.data(), {}};
  for (size_t i = 0; i < runs.shape(0); ++i) part.runs.push_back({runs(i, 0), runs(i, 1), runs(i, 2)});
  return part;
}

// parts: of each adapted linear, None where the adapter has none.
void load_adapter(BoundProgram& self, int slot, const std::vector<std::optional<AdapterPart>>& parts) {
  std::vector<LowRank> loaded;
  for (const std::optional<AdapterPart>& part : parts)
    loaded.push_back(part ? low_rank_of(*part) : LowRank{DType::f32, 0, nullptr, nullptr, {}});
  self.adapters.check(loaded);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i]) continue;
    const int64_t a = static_cast<int64_t>(std::get<2>(*parts[i]).size());
    const int64_t b = static_cast<int64_t>(std::get<3>(*parts[i]).size());
    if (a != a_bytes(loaded[i], self.adapters.shape(static_cast<int>(i))) || b != b_bytes(loaded[i]))
      throw std::invalid_argument("an adapter has " + std::to_string(a) + " and " + std::to_string(b) +
                                  " bytes for linear " + std::to_string(i) + ", which are not what its ranks take");
  }
  self.adapters.load(slot, std::move(loaded));
}

StepRows step_of(const Program& program, const Ints& token_ids, const Ints& positions, const Ints& first_tokens,
                 const Ints& block_tables, const Ints& first_blocks, const Ints& logits_tokens,
                 const std::optional<Ints>& adapters = std::nullopt, const std::optional<States>& states = std::nullopt,
                 const std::optional<States>& saves = std::nullopt) {
  if (positions.size() != token_ids.size() || (adapters && adapters->size() + 1 != first_tokens.size()) ||
      (states && states->shape(0) + 1 != first_tokens.size()) || first_tokens.size() < 2 ||
      first_blocks.size() != first_tokens.size() ||
      int64_t{first_blocks.data()[first_blocks.size() - 1]} * program.num_groups() !=
          static_cast<int64_t>(block_tables.size()))
    throw std::invalid_argument("the arrays of a step do not fit each other");
  StepRows step{};
  step.num_tokens = static_cast<int>(token_ids.size());
  step.num_rows = static_cast<int>(first_tokens.size()) - 1;
  step.num_logits = static_cast<int>(logits_tokens.size());
  step.token_ids = token_ids.data();
  step.positions = positions.data();
  step.first_tokens = first_tokens.data();
  step.block_tables = block_tables.data();
  step.first_blocks = first_blocks.data();
  step.logits_tokens = logits_tokens.data();
  step.adapters = adapters ? adapters->data() : nullptr;
  static_assert(sizeof(StateRow) == 3 * sizeof(int32_t) && sizeof(StateSave) == sizeof(StateRow), "rows of States");
  step.states = states ? reinterpret_cast<const StateRow*>(states->data()) : nullptr;
  step.saves = saves ? reinterpret_cast<const StateSave*>(saves->data()) : nullptr;
  step.num_saves = saves ? static_cast<int>(saves->shape(0)) : 0;
  step.num_groups = program.num_groups();
  return step;
}

void run(BoundProgram& self, const Ints& token_ids, const Ints& positions, const Ints& first_tokens,
         const Ints& block_tables, const Ints& first_blocks, const Ints& logits_tokens,
         const std::optional<Ints>& adapters, const std::optional<States>& states, const std::optional<States>& saves) {
  const StepRows step = step_of(self.program, token_ids, positions, first_tokens, block_tables, first_blocks,
                                logits_tokens, adapters, states, saves);
  nb::gil_scoped_release release;
  self.program.run(step);
}

void run_logits(BoundProgram& self, const Ints& logits_tokens, bool pools) {
  StepRows step{};
  step.pools = pools;
  step.num_logits = static_cast<int>(logits_tokens.size());
  step.logits_tokens = logits_tokens.data();
  nb::gil_scoped_release release;
  self.program.run_logits(step);
}

void chain(BoundProgram& self, Sampler& sampler, const Rows& logits, const Ints& token_ids, const Ints& positions,
           const Ints& first_tokens, const Ints& block_tables, const Ints& first_blocks, const Ints& num_tokens,
           const ChainSettings& settings, const Sequences& sequences, const Table& tokens, const OutInts& num_sampled,
           const OutInts& faults, const Rows* state, const Rows* hidden, const std::optional<Ints>& vocabulary) {
  if (self.program.num_groups() != 1) throw std::invalid_argument("a chain of steps of several groups of layers");
  const StepRows step =
      step_of(self.program, token_ids, positions, first_tokens, block_tables, first_blocks, first_tokens);
  const size_t num_rows = static_cast<size_t>(step.num_rows);
  if (num_tokens.size() != num_rows || settings.shape(0) != num_rows || sequences.shape(0) != num_rows ||
      tokens.shape(0) != num_rows || num_sampled.size() != num_rows || faults.size() != num_rows)
    throw std::invalid_argument("the arrays of a chain do not fit its " + std::to_string(num_rows) + " rows");
  check_width(logits, vocabulary ? static_cast<int64_t>(vocabulary->size()) : self.program.limits().vocab_size);
  if (state != nullptr) check_width(*state, hidden == nullptr ? -1 : hidden->width);
  const ChainRows rows{static_cast<int>(tokens.shape(1)),
                       num_tokens.data(),
                       settings.data(),
                       sequences.data(),
                       tokens.data(),
                       num_sampled.data(),
                       faults.data(),
                       vocabulary ? vocabulary->data() : nullptr};
  const Feedback feedback = state != nullptr ? Feedback{*state, *hidden} : Feedback{};
  nb::gil_scoped_release release;
  run_chain(self.program, sampler, logits, step, rows, state != nullptr ? &feedback : nullptr);
}

std::vector<std::pair<std::string, int64_t>> profile(const BoundProgram& self) {
  std::vector<std::pair<std::string, int64_t>> found;
  for (const Program::Op& op : self.program.ops()) found.emplace_back(op.name, op.nanoseconds);
  return found;
}

}  // namespace

void bind_program(nb::module_& m) {
  m.attr("EXPERT_PASS") = ExpertBuffers::kTokens;
  nb::class_<Rows>(m, "Rows", "Rows of float32 that operations of one program read and write.")
      .def_ro("width", &Rows::width)
      .def(
          "view",
          [](const Rows& self, size_t num_rows) {
            return View(self.values, {num_rows, static_cast<size_t>(self.width)}, nb::handle(), {self.stride, 1});
          },
          nb::arg("num_rows"), nb::rv_policy::reference, "The first rows as an array; only while the program lives.");
  nb::class_<RopeTable>(m, "RopeTable", "Angles of a step's tokens.");
  nb::class_<BoundProgram>(m, "Program", "A list of operations over static buffers; see csrc/program.h.")
      .def(nb::init<ThreadPool&, KVPool&, const std::string&, int, int, int, int, Team*>(), nb::arg("threads"),
           nb::arg("pool"), nb::arg("isa"), nb::arg("max_tokens"), nb::arg("max_logits"), nb::arg("vocab_size"),
           nb::arg("max_positions"), nb::arg("team") = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 9>())
      .def(
          "rows",
          [](BoundProgram& self, int64_t width, bool few) {
            const Program::Limits& limits = self.program.limits();
            const int num_rows = few ? limits.max_logits : std::max(limits.max_tokens, limits.max_logits);
            const int64_t stride = few ? width : odd_lines(width);
            return Rows{self.program.add_rows(num_rows, stride), width, stride};
          },
          nb::arg("width"), nb::arg("few") = false, "few: for no more rows than logits are wanted.")
      .def(
          "operands",
          [](BoundProgram& self, const std::vector<LinearShape>& shapes, bool by_head) {
            self.operand_buffers = std::make_unique<OperandBuffers>(self.program, shapes, by_head);
          },
          nb::arg("shapes"), nb::arg("by_head") = false,
          "Room for the prepared rows of linears of these shapes; once, before them.")
      .def(
          "embed",
          [](BoundProgram& self, const LinearShape& shape, const Bytes& data, int first, float scale,
             const Rows& target, int most) {
            check_width(target, shape.k);
            if (self.program.team() == nullptr && shape.n < (most > 0 ? most : self.program.limits().vocab_size))
              throw std::invalid_argument("fewer embeddings than tokens");
            add_embed(self.program, packed(shape, data), first, most, scale, target);
          },
          nb::arg("shape"), nb::arg("data"), nb::arg("first"), nb::arg("scale"), nb::arg("target"), nb::arg("most") = 0,
          "first: the token of the first embedding, of which a rank has some; most: ids are token + type * most.")
      .def(
          "embed_more",
          [](BoundProgram& self, const LinearShape& shape, const Bytes& data, int offset, int most,
             const Rows& target) {
            check_width(target, shape.k);
            const Program::Limits& limits = self.program.limits();
            if (shape.n < (most > 0 ? limits.vocab_size / most : limits.max_positions + offset) || offset < 0)
              throw std::invalid_argument(std::to_string(shape.n) + " embeddings, fewer than types or positions");
            add_embed_more(self.program, packed(shape, data), offset, most, target);
          },
          nb::arg("shape"), nb::arg("data"), nb::arg("offset"), nb::arg("most"), nb::arg("target"),
          "Adds what belongs to a token's type, or, where most is 0, to its position + offset.")
      .def(
          "layer_norm",
          [](BoundProgram& self, const Rows& rows, const Vector& weight, const Vector& bias, float eps, bool few) {
            add_layer_norm(self.program, rows, vector_of(nb::cast(weight), rows.width),
                           vector_of(nb::cast(bias), rows.width), eps, few);
          },
          nb::arg("rows"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"), nb::arg("few"))
      .def(
          "idle",
          [](BoundProgram& self, const std::string& name, int adapted) {
            add_idle(self.program, self.adapted(adapted), name);
          },
          nb::arg("name"), nb::arg("adapted") = -1, "In the place of what only other ranks compute.")
      .def(
          "prepare",
          [](BoundProgram& self, const Rows& source, const LinearShape& shape, const nb::object& norm, float eps,
             bool few, bool taken, int adapted, const nb::object& order) {
            const Rows from = source.columns(0, shape.k);
            const int32_t* const columns = reinterpret_cast<const int32_t*>(vector_of(order, shape.k));  // bits
            for (int i = 0; columns != nullptr && i < shape.k; ++i)
              if (columns[i] < 0 || columns[i] >= shape.k) throw std::invalid_argument("no order of columns");
            const std::shared_ptr<HalfRows>& half = self.half_written;
            const bool takes = half != nullptr && half->next == self.program.ops().size() && half->few == few &&
                               half->rows.values == from.values && half->rows.width == shape.k && norm.is_none() &&
                               columns == nullptr && !taken && operand_dtype(shape.dtype) == DType::bf16;
            if (takes) half->taken = true, half->reader = self.adapted(adapted);
            self.half_read = takes ? half : nullptr;
            add_prepare(self.program, self.operands(), from, shape, vector_of(norm, shape.k), eps, few, taken,
                        source.values == self.rotated, columns, self.adapted(adapted), self.half_read);
          },
          nb::arg("source"), nb::arg("shape"), nb::arg("norm").none(), nb::arg("eps"), nb::arg("few"), nb::arg("taken"),
          nb::arg("adapted"), nb::arg("order").none() = nb::none())
      .def(
          "adapted_linear",
          [](BoundProgram& self, const LinearShape& shape, bool few) { return self.adapters.add_linear(shape, few); },
          nb::arg("shape"), nb::arg("few"), "A number for a linear that adapters may add to, for its operations.")
      .def(
          "take",
          [](BoundProgram& self, const Rows& source, const Rows& target) {
            check_width(target, source.width);
            add_take(self.program, source, target);
          },
          nb::arg("source"), nb::arg("target"))
      .def("linear", &linear, nb::arg("shape"), nb::arg("data"), nb::arg("target"), nb::arg("column"), nb::arg("first"),
           nb::arg("ending"), nb::arg("alpha"), nb::arg("softcap"), nb::arg("act"), nb::arg("few"), nb::arg("adapted"),
           nb::arg("name"), "column: of the target where the outputs begin; first: the output where a rank's begin.")
      .def("head_linear", &head_linear, nb::arg("shape"), nb::arg("data"), nb::arg("first"), nb::arg("count"),
           nb::arg("copied"), nb::arg("source"), nb::arg("target"), nb::arg("few"), nb::arg("taken"), nb::arg("name"),
           "A matrix a head; first, count: the heads of a rank.")
      .def(
          "gate",
          [](BoundProgram& self, const Rows& gate, const Rows& up, const Rows& target, const std::string& act, bool few,
             int64_t first) {
            check_width(target, gate.width);
            if (act_named(act) == GateAct::clamped_swiglu) throw std::invalid_argument("a gate of its own that clamps");
            add_gate(self.program, gate, up.columns(first, gate.width), target, act_named(act), few);
          },
          nb::arg("gate"), nb::arg("up"), nb::arg("target"), nb::arg("act"), nb::arg("few"), nb::arg("first") = 0,
          "target = act(gate) * up, where the two have formats of their own.")
      .def(
          "norm",
          [](BoundProgram& self, const Rows& source, int64_t source_first, const Rows& target, int64_t target_first,
             int64_t width, const nb::object& weight, float eps, bool few, int num_heads) {
            source.columns(source_first, num_heads * width), target.columns(target_first, num_heads * width);
            add_norm(self.program, source.columns(source_first, width), target.columns(target_first, width),
                     vector_of(weight, width), eps, few, num_heads);
          },
          nb::arg("source"), nb::arg("source_first"), nb::arg("target"), nb::arg("target_first"), nb::arg("width"),
          nb::arg("weight").none(), nb::arg("eps"), nb::arg("few"), nb::arg("num_heads") = 1,
          "Without a weight they are copied. num_heads: so many side by side, of the width each.")
      .def(
          "scale",
          [](BoundProgram& self, const Rows& rows, const nb::object& scale, bool few) {
            add_scale(self.program, rows, vector_of(scale, 1), few);
          },
          nb::arg("rows"), nb::arg("scale"), nb::arg("few"))
      .def(
          "norm_add",
          [](BoundProgram& self, const Rows& part, const Rows& target, const nb::object& weight, float eps, float scale,
             bool few, int num_heads) {
            check_width(target, part.width);
            const Rows head = part.columns(0, part.width / num_heads);
            add_norm_add(self.program, head, target, vector_of(weight, head.width), eps, scale, few, num_heads);
          },
          nb::arg("part"), nb::arg("target"), nb::arg("weight"), nb::arg("eps"), nb::arg("scale"), nb::arg("few"),
          nb::arg("num_heads") = 1)
      .def(
          "routed",
          [](BoundProgram& self, int num_experts, int num_active, int width, int hidden,
             const std::vector<LinearShape>& shapes) {
            self.expert_buffers =
                std::make_unique<ExpertBuffers>(self.program, num_experts, num_active, width, hidden, shapes);
          },
          nb::arg("num_experts"), nb::arg("num_active"), nb::arg("width"), nb::arg("hidden"), nb::arg("shapes"),
          "Room for routed layers, of which each has so many at most, and matrices of these shapes; once, before them.")
      .def("route", &route, nb::arg("logits"), nb::arg("scoring"), nb::arg("num_experts"), nb::arg("num_active"),
           nb::arg("num_groups"), nb::arg("num_active_groups"), nb::arg("best_of_group"), nb::arg("normalized"),
           nb::arg("scale"), nb::arg("correction").none(), nb::arg("few"), nb::arg("expert_scales") = nb::none())
      .def("experts", &experts, nb::arg("num_experts"), nb::arg("num_active"), nb::arg("width"), nb::arg("gate_up"),
           nb::arg("gate_up_data"), nb::arg("first_inner"), nb::arg("down"), nb::arg("down_data"), nb::arg("first_out"),
           nb::arg("target"), nb::arg("ending"), nb::arg("alpha"), nb::arg("act"), nb::arg("act_alpha"),
           nb::arg("act_limit"), nb::arg("few"), nb::arg("name"),
           "Of the rows that were routed last; first_inner, first_out: the outputs where a rank's begin.")
      .def(
          "sigmoid_scale",
          [](BoundProgram& self, const Rows& values, const Rows& logits, int column, bool few) {
            logits.columns(column, 1);
            add_sigmoid_scale(self.program, values, logits, column, few);
          },
          nb::arg("values"), nb::arg("logits"), nb::arg("column"), nb::arg("few"))
      .def_prop_ro(
          "tokens_of_expert",
          [](const BoundProgram& self) {
            std::vector<Counts> found;
            for (const auto& [tokens, count] : self.tokens_of_expert)
              found.emplace_back(tokens, std::initializer_list<size_t>{static_cast<size_t>(count)}, nb::handle());
            return found;
          },
          nb::rv_policy::reference, "Rows that each expert of each routed layer had; only while the program lives.")
      .def("rope_table", &make_rope_table, nb::arg("frequencies"), nb::arg("factor"), nb::arg("query_beta") = 0.0f,
           nb::arg("query_context") = 1)
      .def("qkv", &qkv_op, nb::arg("layer"), nb::arg("num_heads"), nb::arg("source"), nb::arg("rope").none(),
           nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("full_width"), nb::arg("eps"),
           nb::arg("interleaved") = false, nb::arg("query_rope") = nb::none(), nb::arg("queries_only") = false)
      .def("attention", &attention_op, nb::arg("layer"), nb::arg("num_heads"), nb::arg("window"), nb::arg("scale"),
           nb::arg("softcap"), nb::arg("target"), nb::arg("reader"), nb::arg("sinks") = nb::none(),
           nb::arg("gates") = nb::none(),
           "reader: the linear that reads the target next; sinks: a logit a head that only adds to the denominator; "
           "gates: rows with a gate of each output behind queries, keys and values.")
      .def(
          "state_slots",
          [](BoundProgram& self, int num_slots, int num_pending) {
            self.slots.num_slots = num_slots, self.slots.num_pending = num_pending;
          },
          nb::arg("num_slots"), nb::arg("num_pending"), "Before recurrent layers, once.")
      .def("recurrent", &recurrent_op, nb::arg("source"), nb::arg("target"), nb::arg("key_heads"),
           nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("conv_width"), nb::arg("tiled"),
           nb::arg("conv"), nb::arg("step_bias"), nb::arg("rate"), nb::arg("norm"), nb::arg("eps"))
      .def(
          "copy_states",
          [](BoundProgram& self, const std::vector<std::pair<int, int>>& pairs) {
            self.slots.copy(pairs, *self.threads);
          },
          nb::arg("pairs"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "place_layers",
          [](BoundProgram& self, const std::vector<std::pair<int, int>>& places) {
            std::vector<Program::LayerPlace> found;
            for (const auto& [group, layer] : places) found.push_back({group, layer});
            self.program.place_layers(found);
          },
          nb::arg("places"), "Group of each layer, and its place among the group's; before the operations.")
      .def("begin_state", [](BoundProgram& self) { self.program.begin_state(); })
      .def("begin_logits", [](BoundProgram& self) { self.program.begin_logits(); })
      .def("begin_output", [](BoundProgram& self) { self.program.begin_output(); })
      .def("encode", [](BoundProgram& self) { self.encodes = true; }, "Each token sees all of its request; before all.")
      .def("run", &run, nb::arg("token_ids"), nb::arg("positions"), nb::arg("first_tokens"), nb::arg("block_tables"),
           nb::arg("first_blocks"), nb::arg("logits_tokens"), nb::arg("adapters") = nb::none(),
           nb::arg("states") = nb::none(), nb::arg("saves") = nb::none(),
           "states: of each row its slot, drafts of before that it replays, tokens that are no drafts; saves: row, its "
           "tokens, and the slot to which the state after them is written, too.")
      .def("load_adapter", &load_adapter, nb::arg("slot"), nb::arg("parts"),
           "Of each adapted linear (format, rank, A, B, runs) or None; A and B stay the caller's. Between steps.")
      .def_prop_ro(
          "adapter_memory",
          [](BoundProgram& self) -> std::optional<SharedBytes> {
            if (self.adapters.shared_bytes() == nullptr) return std::nullopt;
            return SharedBytes(self.adapters.shared_bytes(), {static_cast<size_t>(Adapters::kSharedBytes)},
                               nb::handle());
          },
          nb::rv_policy::reference,
          "What ranks share for adapters; None for one process. Only while the program lives.")
      .def(
          "release_adapter_memory",
          [](BoundProgram& self, int64_t offset, int64_t num_bytes) {
            self.adapters.release_shared(offset, num_bytes);
          },
          nb::arg("offset"), nb::arg("num_bytes"))
      .def(
          "unload_adapter", [](BoundProgram& self, int slot) { self.adapters.unload(slot); }, nb::arg("slot"))
      .def("chain", &chain, nb::arg("sampler"), nb::arg("logits"), nb::arg("token_ids"), nb::arg("positions"),
           nb::arg("first_tokens"), nb::arg("block_tables"), nb::arg("first_blocks"), nb::arg("num_tokens"),
           nb::arg("settings"), nb::arg("sequences"), nb::arg("tokens").noconvert(), nb::arg("num_sampled").noconvert(),
           nb::arg("faults").noconvert(), nb::arg("state") = nb::none(), nb::arg("hidden") = nb::none(),
           nb::arg("vocabulary") = nb::none(), "A step, then steps of what was sampled; see csrc/chain.h.")
      .def("run_logits", &run_logits, nb::arg("logits_tokens"), nb::arg("pools") = false,
           "Of other tokens of the last step; pools: not the logits, but the rows that they are made of.")
      .def(
          "serve", [](BoundProgram& self) { self.program.serve(); }, nb::call_guard<nb::gil_scoped_release>(),
          "Runs what rank 0 of the team runs, until that says to stop.")
      .def_prop_ro(
          "num_attention_units",
          [](const BoundProgram& self) {
            std::size_t count = 0;
            for (const auto& [key, plan] : self.plans) count += plan->units().size();
            return count;
          },
          "Pieces of work that the last step's attention was divided into, layers of each window counted once.")
      .def_prop_ro("buffer_bytes", [](const BoundProgram& self) { return self.program.buffer_bytes(); })
      .def(
          "set_profiling", [](BoundProgram& self, bool on) { self.program.set_profiling(on); }, nb::arg("on"))
      .def("profile", &profile, "(operation, nanoseconds) of the last run, on the first thread.");
}

}  // namespace maitred
