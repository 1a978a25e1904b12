// One pass of rows over the model: what a node is given, and running its program as phases (team.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "kernels.h"
#include "profile.h"
#include "program.h"

namespace edgespec {

constexpr int kSerial = 1 << 14;   // numbers that are not worth waking a second thread for
constexpr int kRowWork = 1 << 13;  // numbers of the rows that a thread takes at once
constexpr int kPiece = 1 << 10;    // numbers of a chunk of activate: whole vectors

class AdapterStore;
class ExpertStore;
class LayerReader;
struct LowRank;

struct Tensor {
  const void* data = nullptr;
  size_t bytes = 0;
};

struct PassInputs {
  const int64_t* plan = nullptr;  // [6][rows]: token, position, slot + 2^32 x adapter, visible, parent, place
  int rows = 0;
  const int64_t* head_rows = nullptr;  // rows that reach the LM head
  int heads = 0;
  const float* hidden = nullptr;  // [hidden_rows, hidden_width]: the residual stream to start from
  int64_t hidden_rows = 0, hidden_width = 0;
  const bool* gates = nullptr;
  int gate_count = 0;
  // [count][3]: slot, from, to.  From kCommitted: this many tokens of the slot are committed, its states may hold them.
  const int64_t* moves = nullptr;
  int move_count = 0;
  uint8_t* kv = nullptr;  // [slots][kv_bytes], a pool where the layout has tables
  int slots = 0;
  size_t kv_bytes = 0;
  KvLayout layout;
  uint8_t* memory = nullptr;  // [memories][memory_bytes]
  int memories = 0;
  size_t memory_bytes = 0;
  KvLayout memory_layout;
  // [2][rows]: the memory of each row, then how many rows of it are seen or, where it is filled, which one this is.
  const int64_t* sources = nullptr;
  const float* inserted = nullptr;  // [inserted_rows, Program::inserted]: embeddings for rows with tokens below 0
  int64_t inserted_rows = 0;
  const int64_t* axes = nullptr;  // [3][rows]: the positions that rows turn by; null: thrice that of the plan
  bool read_codes = false;
  int top = 0;      // 0: all logits, else the best `top` of each row
  int columns = 0;  // of an LM head: only the first ones; 0: all
  std::vector<Tensor> weights;
  ExpertStore* experts = nullptr;  // where those of mixtures come from; null: from the weights
  LayerReader* layers = nullptr;   // the same of the matrices of layers
  const AdapterStore* adapters = nullptr;
  CodeTables tables;
};

struct PassOutputs {
  float* logits = nullptr;     // [rows of logits, columns]: heads times the rows of Program::active
  int64_t* top_ids = nullptr;  // [rows of logits, top]
  float* top_values = nullptr;
  float* hidden = nullptr;  // [rows, hidden]
};

// 64-byte aligned memory that only grows; its contents do not outlive a step.
class Memory {
 public:
  void* get(size_t bytes) {
    if (bytes > size_) {
      data_.reset();  // not both at once
      size_ = 0;
      data_.reset(new uint8_t[bytes + bytes / 4 + 64]);
      size_ = bytes + bytes / 4;
    }
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data_.get()) + 63) & ~uintptr_t(63));
  }

 private:
  std::unique_ptr<uint8_t[]> data_;
  size_t size_ = 0;
};

// Tokens that a row may attend to: tokens [0, high) of its slot, whose cache indices are their positions, then single
// ones stored out of order (ancestors in a tree), the first of which counts as token `high`.  A window leaves out
// tokens of both that are too far back.
struct Visible {
  struct Token {
    int64_t place, position;
    int column;  // of its scores among those of its group (Group::tiles)
  };
  int64_t high = 0, position = 0;
  std::vector<Token> beyond;

  int64_t end() const { return high + static_cast<int64_t>(beyond.size()); }

  // The first position that a row sees through a window (0: all).
  int64_t oldest(int window) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

  // One more than the last token in order that a row sees through a window that reaches `after` positions past its own
  // (-1: as far as it sees).
  int64_t shut(int after) const { return after >= 0 ? std::min(high, position + after + 1) : high; }
};

// Rows of a text as far as a program's tables must reach: their tokens (below 0: one of the inserted rows), and the
// furthest of their positions and of those that they turn by.
struct Reach {
  const int64_t* tokens;
  int64_t count, last, furthest, inserted = 0;
};

// Throws std::invalid_argument: a token outside the vocabulary, or a position beyond a table, of the steps that the
// gates leave on.
void check_reach(const Program& program, const std::vector<Tensor>& weights, const bool* gates, const Reach& rows);

// Buffers of a pass, kept from pass to pass.
struct Scratch {
  std::vector<Memory> floats, acts;
  Memory expert_in, expert_mid, expert_acts, expert_out;
  Memory mixed, queries, query_floats, query_bytes, query_tables, partial, found_ids, found_values;
  std::vector<Visible> visible, of_memory;  // what each row sees of its cache, and of its memory
  std::vector<int64_t> slots;               // of each row
  Memory given, lows;                       // rows that adapters multiply, and A x of each
};

class Pass {
 public:
  // Throws std::invalid_argument: inputs that do not fit the program, a token, slot or place out of range.
  Pass(const Program& program, const Kernels& kernels, const PassInputs& in, const PassOutputs& out, Scratch& scratch);

  // The Team's contract.
  int open(int members);
  void run(int chunk);

 private:
  void run_chunk(int chunk);
  struct Group {  // rows of one slot or memory, or of one part of it, that attention takes together
    int slot, first, count;
    int64_t begin, end;          // tokens that any of them may see
    int64_t open, shut;          // tokens that all of them see where they belong
    int64_t tail;                // the first block of which some of them see tokens stored out of order
    std::vector<int> leaves;     // the last rows of their paths, for rows that see such tokens
    std::vector<int64_t> tiles;  // of the places of such tokens, ascending
  };
  struct Tail {                   // tokens stored out of order, for one KV head and the blocks [begin, begin + blocks)
    const float *scores, *exact;  // [queries of the group][16 of each of Group::tiles]
    const uint8_t* values;        // [leaves][blocks], as if they were stored in order
    int64_t begin, blocks;
  };

  struct Adapted {  // rows of one row group with the same adapter, and A x of them by matrix and part, [count][rank]
    int adapter, first, count;
    std::vector<const float*> low[2];
  };

  struct Expert {  // its rows among those that are sent to experts, and the first of its pieces
    int id, first, count, piece;
  };
  struct Piece {  // a row group of an expert
    int first, count;
  };
  struct Before {  // a token that a short convolution sees: a row of the pass, or -1 and its place
    int64_t row, place;
  };
  struct Sequence {  // rows of one slot at a delta rule: what its state holds, shall hold, and the rows see
    int slot, first, count;
    int64_t applied, kept, visible;
    int recalled;  // its first among all tokens that are recalled
  };
  struct Turn {  // a row continues from one level's state, and leaves its own at another
    int row, from, to;
  };

  void split_slots();
  void check() const;
  void check_states() const;
  void check_sources() const;
  int64_t check_axes() const;
  void check_blocks(int64_t slot, int64_t first, int64_t end) const;
  int next_phase(int members);
  void count_phase();
  int cut(int units, int members);
  void see();
  void apply_moves() const;
  float* floats(int id) const { return float_[id]; }
  const void* weight(int id) const {
    if (in_.layers && id >= 0)
      if (const void* held = streamed(id)) return held;
    return id < 0 ? nullptr : in_.weights[id].data;
  }
  const void* streamed(int id) const;
  const float* vector(int id) const { return static_cast<const float*>(weight(id)); }
  // Tiles from `tile` on of a matrix [.., k] of the step, with its low plane where it is read.
  Weights tiles(const Step& s, int id, int low, size_t tile, int k) const { return tiles(s, s.kind, id, low, tile, k); }
  Weights tiles(const Step& s, Kind kind, int id, int low, size_t tile, int k) const {
    const auto* high = static_cast<const uint8_t*>(weight(id)) + tile * tile_bytes(kind, k);
    if (kind != kP8 || s.high_alone(in_.gates, kind)) return high;
    return {high, static_cast<const uint8_t*>(weight(low)) + tile * low_bytes(k)};
  }
  void fit_offsets(const Step& s);
  const int64_t* axis(int number) const { return in_.axes ? in_.axes + size_t(number) * in_.rows : plan(1); }
  void turn(const Step& s, int row, float* y) const;
  const int64_t* plan(int line) const { return in_.plan + size_t(line) * in_.rows; }
  const int64_t* slots() const { return scratch_.slots.data(); }
  int count(const Step& s) const { return s.rows == 2 ? in_.heads * s.times : s.rows ? in_.heads : in_.rows; }
  // Row of the source that a row of this step is computed from.
  size_t source(const Step& s, int row) const {
    return s.rows == 2 ? size_t(s.first) * in_.heads + row : s.rows ? in_.head_rows[row] : row;
  }
  Cache cache(int slot) const {
    const KvLayout& layout = in_.layout;
    return layout.table ? Cache(in_.kv + slot * layout.slot_bytes(), in_.kv + in_.slots * layout.slot_bytes(),
                                table(slot), layout)
                        : Cache(in_.kv + size_t(slot) * in_.kv_bytes, layout);
  }
  // Keys and values that a step reads or writes.
  const KvLayout& layout(const Step& s) const { return s.memory ? in_.memory_layout : in_.layout; }
  Cache cache(const Step& s, int number) const {
    return s.memory ? Cache(in_.memory + size_t(number) * in_.memory_bytes, in_.memory_layout) : cache(number);
  }
  bool read_codes(const Step& s) const { return in_.read_codes && !s.memory; }
  const Visible& seen(const Step& s, int row) const { return (s.memory ? scratch_.of_memory : scratch_.visible)[row]; }
  const int32_t* table(int64_t slot) const {
    return reinterpret_cast<const int32_t*>(in_.kv + slot * in_.layout.slot_bytes() + in_.layout.header_bytes());
  }
  // Activations of a row group, for a matrix of that kind.
  const void* group_acts(int id, Kind kind, int k, int group) const;

#define STEP(name, ...) void name(const Step& s, int chunk);
#include "steps.inl"
  int open_own(const Step& s, int members);
  int groups_together(const Step& s) const;
  void reduce(const Step& s);
  void add_low(int which, int weight, int tile, int group, float* y, size_t ld);
  void linear_tile(const Step& s, int tile, int first, int last);
  void glu_unit(const Step& s, int unit, int first, int last);
  void normed(const Step& s, const float* x, float* y) const;
  void copy_head(int id, int heads, int head, int dim, int group, float* y) const;
  int64_t activate_pieces(const Step& s) const;
  void before(int row, int length, Before* seen) const;
  void gather(const Step& s);
  void next_experts(const Step& s);
  int open_experts(const Step& s, int members);
  int cut_experts(int units, int members);
  Sequence sequence(int layer, int first) const;
  bool chain(const Sequence& q) const;
  void order_rows();
  void plan_states(const Step& s);
  int open_delta(const Step& s);
  void mix_one(const Step& s, const float* const* rows, const float* own, float* y) const;
  void recall(const Step& s, int chunk);
  void mix(const Step& s, int row);
  void advance(const Step& s, int chunk);
  float* mixed(int row) const { return mixed_ + size_t(row) * program_.state_width; }
  int columns(const Step& s) const { return in_.columns ? std::min(in_.columns, s.n) : s.n; }  // of an LM head
  void finish_logits(const Step& s, int tile, int columns, float* y) const;
  void best(const Step& s, int chunk);
  void merge_best(const Step& s);
  KvFormat key_format(const Step& s) const {  // that attention reads
    return read_codes(s) ? in_.layout.codes : layout(s).keys;
  }
  // Whether it reads the newest and the first keys exactly; only drafts may have a window.
  bool reads_recent(const Step& s) const {
    return !s.memory && in_.layout.ring && in_.layout.window && is_coded(key_format(s));
  }
  void plan_queries(const Step& s);
  void plan_attention(const Step& s);
  void find_tail(Group& group);
  void attend_tail(const Step& s, const Group& group, const Cache& kv, int head, int split, int64_t first,
                   int64_t end) const;
  void attend_block(const Step& s, const Group& group, const Cache& kv, int head, int split, int64_t block, int there,
                    int first, int queries, ptrdiff_t ahead, const Tail* tail) const;
  size_t query_at(const Step& s, int kv_head, int row) const;
  float* partial(const Step& s, const Group& group, int kv_head, int split) const;
  void merge(const Step& s, int chunk);
  void prepare_query(const Step& s, int row, int head, const float* q);
  void relate(const Step& s, const Group& group, int kv_head, int first, int queries, int64_t from, int tokens,
              float* scores) const;
  void recent_scores(const Step& s, const Group& group, int kv_head, int64_t from, int tokens, int first_query,
                     int queries, float* scores) const;
  void hide(const Step& s, const Group& group, int first_query, int queries, int64_t from, int tokens, const Tail* tail,
            float* scores) const;
  void score_tail(const Step& s, const Group& group, const Cache& kv, int head, bool exact, float* scores) const;
  void lay_values(const Step& s, const Group& group, const Cache& kv, int head, int64_t begin, int64_t blocks,
                  uint8_t* out) const;
  void weigh_tail(const Step& s, const Group& group, const Cache& kv, int head, int64_t block, int there, int first,
                  int queries, const Tail& tail, const float* p, float* out) const;

  const Program& program_;
  const Kernels& k_;
  const PassInputs& in_;
  const PassOutputs& out_;
  Scratch& scratch_;
  const Active active_;
  int64_t blocks_;    // of the pool
  int64_t capacity_;  // tokens of a slot
  float* float_[kBuffers] = {};
  void* act_[kBuffers] = {};
  size_t next_ = 0;  // step to look at next
  const Step* step_ = nullptr;
  bool lowered_[kBuffers] = {};  // whether activations have offsets for reading only the high plane
  int mixing_ = 0;               // the phase of a mixture of experts
  std::vector<Expert> experts_;
  int mixed_first_ = 0, mixed_end_ = 0;  // those that are computed now
  std::vector<Piece> pieces_;
  std::vector<int> slots_;  // [rows, experts of a row]: index of the row among those sent
  std::vector<Adapted> adapted_;
  Stopwatch watch_;
  bool merging_ = false;     // the second phase of attention
  int each_ = 1;             // rows of a chunk of a step that is cut by rows
  std::vector<int> bounds_;  // chunk i covers units [bounds_[i], bounds_[i + 1]) of a matrix
  std::vector<Group> groups_;
  std::vector<int> path_;  // of each row: which of its group's leaves has it on its path, -1: all it sees is in order
  int dim_ = 0;            // of this step's heads, rounded up
  int splits_ = 1;
  int item_heads_ = 1;  // KV heads of an item of attention: one or all
  Query* queries_ = nullptr;
  int stage_ = 0;  // phase of a delta rule
  int recalled_ = 0, levels_ = 1;
  float* mixed_ = nullptr;  // [recalled + rows, state_width]
  std::vector<Sequence> sequences_;
  std::vector<Turn> turns_;
};

}  // namespace edgespec
