// The books of the text in a slot: how many tokens its memory holds, what of their states is lost, which rows the next
// pass moves, and checkpoints.  The C interface (texts.h) and Python's slots (edgespec/runtimes/slots/books.py) both
// keep theirs here.  The tokens belong to the callers.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cache.h"
#include "visible.h"

namespace edgespec {

enum Line : int { kTokens, kPositions, kSlots, kVisible, kParents, kPlaces };  // of a plan

// How rows continue a text.
enum How : int64_t {
  kTree = 1,        // the line of parents says which earlier row each continues, -1: the text; else each the one before
  kMutual = 2,      // every row sees all others
  kHypotheses = 4,  // the line of visible tokens says how much of the text each row sees; else all of it
  kDraft = 8,       // none of them waits to be kept
  kRead = 16,       // they are part of the text for certain
};

// Rows [first, first + count) of a plan [6][width] that continue a text, `offset` rows of earlier passes after it.
struct Rows {
  int64_t* plan;
  int64_t width, first, count, offset;
  int64_t how;  // of How

  int64_t* line(Line number) const { return plan + number * width + first; }
};

class Text {
 public:
  // layout: of its slot's memory.  taps: tokens that a convolution sees.
  Text(const KvLayout& layout, int taps);

  // Where the states and the exact recent keys of its slot are; its owner may move them.
  void attach(uint8_t* head) { head_ = head; }

  int64_t length() const { return length_; }
  // Tokens ever written that may be read again.
  int64_t high_water_mark() const { return high_water_mark_ > length_ ? high_water_mark_ : length_; }

  // Says that the memory holds a text, without checkpoints.
  void hold(int64_t length, int64_t high_water_mark);
  void clear();

  // ---- passes

  // Writes the lines of rows but their tokens.  Throws std::invalid_argument, and nothing has changed.
  void plan(const Rows& rows, int64_t slot) const;
  // Says that these rows, as planned, are run; nothing is allocated if there is room for them.
  void run(const Rows& rows);
  void make_room(int64_t rows) { parents_.reserve(static_cast<size_t>(rows)); }
  // Commits rows of the last pass, a path from the text on, counted from `first` (null: those from `first` on).  Throws
  // std::invalid_argument, and nothing has changed.
  void keep(const int64_t* rows, int64_t count, int64_t first = 0);
  void forget_rows() { parents_.clear(); }

  // Moves that come before the next pass, and then how many tokens the states may hold after it: `read` rows of it are
  // part of the text at once.  revocable: kept tokens may be taken back.
  int64_t moves() const { return static_cast<int64_t>(moves_.size()); }
  int64_t waiting() const { return moves() + (delta() ? 1 : 0); }
  void write_moves(int64_t* out, int64_t slot, int64_t read, bool revocable) const;  // [waiting][3]
  void moved() { moves_.clear(); }
  // Tokens that the text and its moves read.
  int64_t needed() const;

  // ---- going back

  // Tokens that crop() would leave: `length`, or fewer where states go back to a checkpoint.
  int64_t cropped(int64_t length) const;
  int64_t crop(int64_t length);
  // Forgets the text after the last checkpoint of at most `most` tokens, or all of it -> its length.
  int64_t restart(int64_t most);
  // Whether the states that a row after `visible` tokens reads are there, in a pass of `count` rows.
  bool reaches(int64_t visible, int64_t count) const;

  // The first tokens of a text, at most `length`, that another one may copy -> how many.
  int64_t lends(int64_t length) const;
  // Says that the memory holds the first tokens of another text, copied with its head -> how many are left.
  int64_t copy_prefix_from(const Text& other, int64_t length);

  // ---- states

  bool stateful() const { return layout_.ring || layout_.states; }
  bool delta() const { return layout_.states && layout_.state_matrix; }
  bool has_checkpoints() const { return layout_.states && !layout_.ring; }  // recent keys would have to be copied too
  // Tokens that the states of delta rules hold: the fewest and the most of its layers.
  std::pair<int64_t, int64_t> held() const;
  void set_held(int64_t tokens);

  // The part of the states that the next token reads, as they hold the text: float32 numbers; copying it, and putting
  // it back.
  size_t state_size() const { return state_size(length_); }
  void copy_states(float* out) const;
  bool put_states(const float* states, size_t count);  // false: another size

  // Keeps the states of the text as it is, for crop().  At most `most` are kept: the first and the newest ones.
  void checkpoint();
  void limit(size_t most);
  std::vector<int64_t> checkpoints() const;  // their lengths
  size_t checkpoint_bytes() const;

 private:
  struct Move {
    int64_t from, to;
  };
  using States = std::shared_ptr<const std::vector<float>>;

  bool is_lost(int64_t same) const;
  size_t state_size(int64_t tokens) const;
  template <class Visit>
  void each_state(int64_t tokens, Visit visit) const;
  void restore(int64_t tokens, const float* from);
  int64_t last_checkpoint(int64_t most) const;
  void forget_checkpoints(int64_t after) { checkpoints_.erase(checkpoints_.upper_bound(after), checkpoints_.end()); }

  KvLayout layout_;  // of states and exact recent keys alone
  int64_t taps_;
  uint8_t* head_ = nullptr;
  int64_t length_ = 0;
  int64_t high_water_mark_ = 0;   // tokens ever written, of those whose states or exact keys may be lost
  int64_t since_ = 0;             // tokens before which no row of those is there, only what the next token reads
  int64_t certain_ = 0;           // tokens that will not be taken back
  int64_t end_ = 0;               // of the rows of the last pass
  std::vector<int64_t> parents_;  // of the rows that may be kept
  std::vector<Move> moves_;       // before the next pass
  std::map<int64_t, States> checkpoints_;  // by length of the text
  size_t most_;
};

}  // namespace edgespec

// For Python: a function that can fail returns a number below 0, and edgespec_error() says why.
EDGESPEC_EXPORT edgespec::Text* edgespec_text_open(int64_t states, int64_t width, int64_t matrix, int64_t taps,
                                                   int64_t ring);
EDGESPEC_EXPORT void edgespec_text_close(edgespec::Text* text);
EDGESPEC_EXPORT void edgespec_text_attach(edgespec::Text* text, uint8_t* head);
EDGESPEC_EXPORT void edgespec_text_hold(edgespec::Text* text, int64_t length, int64_t high_water_mark);
EDGESPEC_EXPORT int64_t edgespec_text_high_water_mark(const edgespec::Text* text);
// Plans rows that are run next.
EDGESPEC_EXPORT int64_t edgespec_text_plan(edgespec::Text* text, int64_t* plan, int64_t width, int64_t first,
                                           int64_t count, int64_t offset, int64_t how, int64_t slot);
EDGESPEC_EXPORT int64_t edgespec_text_keep(edgespec::Text* text, const int64_t* rows, int64_t count);
EDGESPEC_EXPORT int64_t edgespec_text_waiting(const edgespec::Text* text);
EDGESPEC_EXPORT void edgespec_text_moves(const edgespec::Text* text, int64_t* out, int64_t slot, int64_t read,
                                         int64_t revocable);
EDGESPEC_EXPORT void edgespec_text_moved(edgespec::Text* text);
EDGESPEC_EXPORT int64_t edgespec_text_needed(const edgespec::Text* text);
EDGESPEC_EXPORT int64_t edgespec_text_cropped(const edgespec::Text* text, int64_t length);
EDGESPEC_EXPORT int64_t edgespec_text_crop(edgespec::Text* text, int64_t length);
EDGESPEC_EXPORT int64_t edgespec_text_restart(edgespec::Text* text);
EDGESPEC_EXPORT int64_t edgespec_text_reaches(const edgespec::Text* text, int64_t visible, int64_t count);
EDGESPEC_EXPORT int64_t edgespec_text_lends(const edgespec::Text* text, int64_t length);
EDGESPEC_EXPORT int64_t edgespec_text_copy_prefix_from(edgespec::Text* text, const edgespec::Text* other,
                                                       int64_t length);
// Tokens of the text that the states of delta rules do not hold yet (below 0: they hold more), 0 without such rules.
EDGESPEC_EXPORT int64_t edgespec_text_behind(const edgespec::Text* text);
EDGESPEC_EXPORT void edgespec_text_set_held(edgespec::Text* text, int64_t tokens);
EDGESPEC_EXPORT int64_t edgespec_text_state_size(const edgespec::Text* text);
EDGESPEC_EXPORT void edgespec_text_copy_states(const edgespec::Text* text, float* out);
EDGESPEC_EXPORT int64_t edgespec_text_put_states(edgespec::Text* text, const float* states, int64_t count);
EDGESPEC_EXPORT int64_t edgespec_text_checkpoint(edgespec::Text* text);
EDGESPEC_EXPORT void edgespec_text_limit(edgespec::Text* text, int64_t most);
EDGESPEC_EXPORT int64_t edgespec_text_checkpoints(const edgespec::Text* text, int64_t* lengths, int64_t room);
EDGESPEC_EXPORT int64_t edgespec_text_checkpoint_bytes(const edgespec::Text* text);
