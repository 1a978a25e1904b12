// Parts of C's and C++'s runtimes that Zig's for WebAssembly lack, or have for one thread.  It needs nothing of those
// libraries that would bring their own parts in.
#if defined(__wasm__)
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "web_threads.h"

// ---- memory.  Zig's allocator is for one thread, and rounds weights and caches up to powers of two.  Small blocks are
// on shelves by size, in steps of a quarter; large ones are pages that join when they are given back.

namespace {

constexpr size_t kPage = size_t(1) << 16, kLarge = kPage / 2, kAlign = 16;
constexpr size_t kChunk = 16;  // pages that are cut into small blocks
constexpr int kShelves = 40, kOfPages = -1;

struct Header {  // before each block
  uint8_t* start;
  size_t room;   // bytes after the header
  size_t pages;  // of a large one
  int32_t shelf;
};
static_assert(sizeof(Header) == kAlign);

struct Item {
  Item* next;
};
struct Extent {  // of free pages, by address
  Extent* next;
  size_t pages;
  uint8_t* end() { return reinterpret_cast<uint8_t*>(this) + pages * kPage; }
};

std::mutex g_lock;
Item* g_shelves[kShelves];
Extent* g_extents;
uint8_t *g_chunk, *g_chunk_end;

constexpr size_t size_of(int shelf) { return size_t(4 + shelf % 4) << (shelf / 4 + 4); }  // 64, 80, 96, 112, 128, 160
static_assert(size_of(kShelves - 1) >= kLarge);

// fresh: they are zero.  null: there is no memory.
uint8_t* take_pages(size_t pages, bool* fresh) {
  *fresh = false;
  Extent** last = nullptr;
  for (Extent** at = &g_extents; *at; last = at, at = &(*at)->next) {
    Extent* found = *at;
    if (found->pages < pages) continue;
    found->pages -= pages;  // from its end: the rest stays in its place
    uint8_t* taken = found->end();
    if (!found->pages) *at = found->next;
    return taken;
  }
  if (last && (*last)->end() == reinterpret_cast<uint8_t*>(__builtin_wasm_memory_size(0) * kPage)) {
    Extent* found = *last;
    if (__builtin_wasm_memory_grow(0, pages - found->pages) == SIZE_MAX) return nullptr;
    *last = nullptr;
    return reinterpret_cast<uint8_t*>(found);
  }
  const size_t before = __builtin_wasm_memory_grow(0, pages);
  if (before == SIZE_MAX) return nullptr;
  *fresh = true;
  return reinterpret_cast<uint8_t*>(before * kPage);
}

void give_pages(uint8_t* start, size_t pages) {
  Extent** at = &g_extents;
  Extent* before = nullptr;
  while (*at && reinterpret_cast<uint8_t*>(*at) < start) before = *at, at = &before->next;
  auto* made = reinterpret_cast<Extent*>(start);
  *made = {*at, pages};
  *at = made;
  if (made->next && made->end() == reinterpret_cast<uint8_t*>(made->next))
    *made = {made->next->next, made->pages + made->next->pages};
  if (before && before->end() == start) *before = {made->next, before->pages + made->pages};
}

void* allocate(size_t align, size_t size, bool zero) {
  const size_t most = size + sizeof(Header) + (align > kAlign ? align : 0);
  if (most < size || most > SIZE_MAX - kPage) return nullptr;
  const std::lock_guard<std::mutex> lock(g_lock);
  Header header{};
  bool fresh = false;
  size_t whole = 0;
  if (most > kLarge) {
    header.shelf = kOfPages;
    header.pages = (most + kPage - 1) / kPage;
    whole = header.pages * kPage;
    header.start = take_pages(header.pages, &fresh);
    if (!header.start) return nullptr;
  } else {
    while (size_of(header.shelf) < most) ++header.shelf;
    whole = size_of(header.shelf);
    if (Item* item = g_shelves[header.shelf]) {
      g_shelves[header.shelf] = item->next;
      header.start = reinterpret_cast<uint8_t*>(item);
    } else {
      if (size_t(g_chunk_end - g_chunk) < whole) {  // what is left of the chunk is too little to be kept
        uint8_t* chunk = take_pages(kChunk, &fresh);
        if (!chunk) return nullptr;
        fresh = false;
        g_chunk = chunk;
        g_chunk_end = chunk + kChunk * kPage;
      }
      header.start = g_chunk;
      g_chunk += whole;
    }
  }
  uint8_t* made = header.start + sizeof(Header);
  if (align > kAlign) made += -reinterpret_cast<uintptr_t>(made) & (align - 1);
  header.room = size_t(header.start + whole - made);
  std::memcpy(made - sizeof(Header), &header, sizeof header);
  if (zero && !fresh) std::memset(made, 0, size);
  return made;
}

Header header_of(void* block) {
  Header found;
  std::memcpy(&found, static_cast<uint8_t*>(block) - sizeof found, sizeof found);
  return found;
}

void* or_error(void* made) {
  if (!made) errno = ENOMEM;
  return made;
}

}  // namespace

extern "C" {

void* malloc(size_t size) { return or_error(allocate(kAlign, size, false)); }
void* aligned_alloc(size_t align, size_t size) { return or_error(allocate(align, size, false)); }
void* memalign(size_t align, size_t size) { return aligned_alloc(align, size); }
int posix_memalign(void** made, size_t align, size_t size) {
  *made = allocate(align, size, false);
  return *made ? 0 : ENOMEM;
}
void* calloc(size_t count, size_t size) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) return or_error(nullptr);
  return or_error(allocate(kAlign, bytes, true));
}
void free(void* block) {
  if (!block) return;
  const Header header = header_of(block);
  const std::lock_guard<std::mutex> lock(g_lock);
  if (header.shelf == kOfPages) return give_pages(header.start, header.pages);
  auto* item = reinterpret_cast<Item*>(header.start);
  item->next = g_shelves[header.shelf];
  g_shelves[header.shelf] = item;
}
void* realloc(void* block, size_t size) {
  if (!block) return malloc(size);
  const size_t room = header_of(block).room;
  if (size <= room) return block;
  void* made = malloc(size);
  if (!made) return nullptr;
  std::memcpy(made, block, room);
  free(block);
  return made;
}
}

// ---- exceptions, and objects that are initialized where they are first used

__asm__(
    ".tagtype __cpp_exception i32\n"
    ".globl __cpp_exception\n"
    "__cpp_exception:\n");

extern "C" void* __cxa_get_globals() {
  static thread_local struct {
    void* caught = nullptr;
    unsigned uncaught = 0;
  } mine;
  return &mine;
}
extern "C" void* __cxa_get_globals_fast() { return __cxa_get_globals(); }

namespace {
constexpr int kReady = 1, kBegun = 256;  // the compiler looks at the lowest byte
std::atomic<int>& word_of(void* guard) { return *static_cast<std::atomic<int>*>(guard); }
}  // namespace
extern "C" int __cxa_guard_acquire(void* guard) {
  std::atomic<int>& word = word_of(guard);
  for (;;) {
    int seen = 0;
    if (word.compare_exchange_strong(seen, kBegun)) return 1;
    if (seen & kReady) return 0;
    edgespec::wait_while(word, kBegun);
  }
}
extern "C" void __cxa_guard_release(void* guard) {
  word_of(guard) = kReady;
  edgespec::wake(word_of(guard), ~0u);
}
extern "C" void __cxa_guard_abort(void* guard) {
  word_of(guard) = 0;
  edgespec::wake(word_of(guard), ~0u);
}

// A thread ends with the module, whose memory is forgotten as a whole.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }
#endif
