// Sessions of the C interface for Java and Kotlin: dev.edgespec.runtimes.Native (android_demo).
//
// JNI's functions are a table whose places the specification fixes, so no header of a JDK or NDK is needed to build
// (https://docs.oracle.com/en/java/javase/17/docs/specs/jni/functions.html).
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "edgespec.h"

#ifdef _WIN32
#define EDGESPEC_JNI(type, name) extern "C" __declspec(dllexport) type Java_dev_edgespec_runtimes_Native_##name
#else
#define EDGESPEC_JNI(type, name) \
  extern "C" __attribute__((visibility("default"))) type Java_dev_edgespec_runtimes_Native_##name
#endif

namespace {

using Env = void* const**;
using Object = void*;
using Method = void*;
union Value {  // jvalue
  uint8_t flag;
  int32_t number;
  int64_t whole;
  Object object;
};
enum Place {
  kFindClass = 6,
  kNewGlobalRef = 21,
  kDeleteGlobalRef = 22,
  kDeleteLocalRef = 23,
  kGetObjectClass = 31,
  kGetMethodID = 33,
  kCallObjectMethodA = 36,
  kCallBooleanMethodA = 39,
  kCallVoidMethodA = 63,
  kGetArrayLength = 171,
  kNewObjectArray = 172,
  kGetObjectArrayElement = 173,
  kSetObjectArrayElement = 174,
  kNewByteArray = 176,
  kNewIntArray = 179,
  kNewLongArray = 180,
  kNewFloatArray = 181,
  kNewDoubleArray = 182,
  kGetBooleanArrayRegion = 199,
  kGetByteArrayRegion = 200,
  kGetIntArrayRegion = 203,
  kGetLongArrayRegion = 204,
  kGetDoubleArrayRegion = 206,
  kSetByteArrayRegion = 208,
  kSetIntArrayRegion = 211,
  kSetLongArrayRegion = 212,
  kSetFloatArrayRegion = 213,
  kSetDoubleArrayRegion = 214,
  kExceptionCheck = 228,
  kNewDirectByteBuffer = 229,
};

template <class Result, class... Arguments>
Result call(Env env, Place place, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Env, Arguments...)>((*env)[place])(env, arguments...);
}

thread_local Env calling = nullptr;  // of the call from Java that runs in this thread
thread_local int32_t failed = EDGESPEC_OK;

// A call that may call Java back.
class Call {
 public:
  explicit Call(Env env) : before_(calling) { calling = env; }
  ~Call() { calling = before_; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  Env before_;
};

// Notes the status of a call -> whether it succeeded.
bool done(int32_t status) {
  failed = status;
  return status == EDGESPEC_OK;
}

template <class T>
Object array_of(Env env, Place make, Place set, const T* values, size_t count) {
  const auto size = static_cast<int32_t>(count);
  const Object found = call<Object>(env, make, size);
  if (found && size) call<void>(env, set, found, int32_t{0}, size, values);
  return found;
}

Object bytes_of(Env env, const char* text, size_t size) {
  return array_of(env, kNewByteArray, kSetByteArrayRegion, text, size);
}

Object doubles_of(Env env, const double* values, size_t count) {
  return values ? array_of(env, kNewDoubleArray, kSetDoubleArrayRegion, values, count) : nullptr;
}

Object ints_of(Env env, const std::vector<int32_t>& values) {
  return array_of(env, kNewIntArray, kSetIntArrayRegion, values.data(), values.size());
}

Object ints_of(Env env, const int64_t* values, size_t count) {
  return values ? ints_of(env, std::vector<int32_t>(values, values + count)) : nullptr;
}

// The values of an array; none of null.
template <class T>
std::vector<T> read(Env env, Place get, Object array) {
  std::vector<T> found(array ? static_cast<size_t>(call<int32_t>(env, kGetArrayLength, array)) : 0);
  if (!found.empty()) call<void>(env, get, array, int32_t{0}, static_cast<int32_t>(found.size()), found.data());
  return found;
}

std::string text_of(Env env, Object bytes) {
  const std::vector<char> found = read<char>(env, kGetByteArrayRegion, bytes);
  return {found.begin(), found.end()};
}

std::vector<int64_t> tokens_of(Env env, Object ints) {
  const std::vector<int32_t> found = read<int32_t>(env, kGetIntArrayRegion, ints);
  return {found.begin(), found.end()};
}

std::vector<std::string> texts_of(Env env, Object arrays) {
  std::vector<std::string> found(arrays ? static_cast<size_t>(call<int32_t>(env, kGetArrayLength, arrays)) : 0);
  for (size_t i = 0; i < found.size(); ++i) {
    const Object one = call<Object>(env, kGetObjectArrayElement, arrays, static_cast<int32_t>(i));
    found[i] = text_of(env, one);
    call<void>(env, kDeleteLocalRef, one);
  }
  return found;
}

// An object of Java that is called back; it stays until this is gone.
class Callee {
 public:
  Callee(Env env, Object of) : object_(of ? call<Object>(env, kNewGlobalRef, of) : nullptr) {}
  ~Callee() {
    if (object_ && calling) call<void>(calling, kDeleteGlobalRef, object_);
  }
  Callee(const Callee&) = delete;
  Callee& operator=(const Callee&) = delete;

  // null: there is no such method, and Java throws.
  Method find(Env env, const char* name, const char* signature) const {
    const Object type = call<Object>(env, kGetObjectClass, object_);
    const Method found = call<Method>(env, kGetMethodID, type, name, signature);
    call<void>(env, kDeleteLocalRef, type);
    return found;
  }
  Object object() const { return object_; }

 private:
  Object object_;
};

bool thrown(Env env) { return call<uint8_t>(env, kExceptionCheck) != 0; }

// ---- a codec in Java: dev.edgespec.runtimes.AppCodec -------------------------------------------------------------

struct AppCodec {
  Callee callee;
  Method encode, decode, close;
};

// Copies an array that a method gives -> 0: there is one.
template <class T, class To>
int answer(Object found, Place get, To* to, size_t room, size_t* count) {
  if (thrown(calling) || !found) return 1;
  const std::vector<T> values = read<T>(calling, get, found);
  call<void>(calling, kDeleteLocalRef, found);
  *count = values.size();
  for (size_t i = 0; i < values.size() && i < room; ++i) to[i] = values[i];
  return 0;
}

int encode_by_app(void* user, const char* text, size_t size, int32_t special, int64_t* ids, size_t room,
                  size_t* count) {
  const auto& codec = *static_cast<const AppCodec*>(user);
  Value given[2]{};
  given[0].object = bytes_of(calling, text, size);
  if (!given[0].object) return 1;
  given[1].flag = special != 0;
  const Object found =
      call<Object>(calling, kCallObjectMethodA, codec.callee.object(), codec.encode, static_cast<const Value*>(given));
  return answer<int32_t>(found, kGetIntArrayRegion, ids, room, count);
}

int decode_by_app(void* user, const int64_t* ids, size_t count, char* text, size_t room, size_t* size) {
  const auto& codec = *static_cast<const AppCodec*>(user);
  Value given[1]{};
  given[0].object = ints_of(calling, ids, count);
  if (!given[0].object) return 1;
  const Object found =
      call<Object>(calling, kCallObjectMethodA, codec.callee.object(), codec.decode, static_cast<const Value*>(given));
  call<void>(calling, kDeleteLocalRef, given[0].object);
  return answer<char>(found, kGetByteArrayRegion, text, room, size);
}

void close_app(void* user) {
  const std::unique_ptr<AppCodec> codec(static_cast<AppCodec*>(user));
  call<void>(calling, kCallVoidMethodA, codec->callee.object(), codec->close, static_cast<const Value*>(nullptr));
}

// ---- passes in Java: dev.edgespec.runtimes.HostModel -------------------------------------------------------------

struct Host {
  Callee callee;
  Method run;
  std::string said;
};

int run_by_app(void* user, const edgespec_host_pass* pass) {
  auto& host = *static_cast<Host*>(user);
  const auto rows = static_cast<size_t>(pass->rows);
  const Object buffer = pass->logits ? call<Object>(calling, kNewDirectByteBuffer, static_cast<void*>(pass->logits),
                                                    int64_t{4} * pass->scored * pass->columns)
                                     : nullptr;
  Value given[7]{};
  given[0].object = ints_of(calling, pass->tokens, rows);
  given[1].object = ints_of(calling, pass->positions, rows);
  given[2].object = pass->parents ? ints_of(calling, {pass->parents, pass->parents + rows}) : nullptr;
  given[3].number = static_cast<int32_t>(pass->kept);
  given[4].object =
      pass->move_count ? ints_of(calling, pass->moves, 2 * static_cast<size_t>(pass->move_count)) : nullptr;
  given[5].number = pass->scored;
  given[6].object = buffer;
  const Object found =
      call<Object>(calling, kCallObjectMethodA, host.callee.object(), host.run, static_cast<const Value*>(given));
  for (int i : {0, 1, 2, 4, 6}) call<void>(calling, kDeleteLocalRef, given[i].object);
  if (!found) return 0;
  host.said = text_of(calling, found);
  call<void>(calling, kDeleteLocalRef, found);
  return 1;
}

const char* error_by_app(void* user) { return static_cast<const Host*>(user)->said.c_str(); }

// null: there is none.
std::unique_ptr<Host> host_of(Env env, Object model, edgespec_host& functions) {
  if (!model) return nullptr;
  auto made = std::unique_ptr<Host>(new Host{{env, model}, nullptr, {}});
  made->run = made->callee.find(env, "run", "([I[I[II[IILjava/nio/ByteBuffer;)[B");
  functions = EDGESPEC_INIT(edgespec_host);
  functions.trees = 1;
  functions.user = made.get();
  functions.run = run_by_app;
  functions.error = error_by_app;
  return made;
}

// ---- sessions ----------------------------------------------------------------------------------------------------

struct Session {
  edgespec_session* session = nullptr;
  std::unique_ptr<Host> target, draft;  // where passes are the app's
  std::unique_ptr<Callee> watch;        // of the text
  Method read = nullptr, allowed = nullptr;
};

Session* session_of(int64_t handle) { return reinterpret_cast<Session*>(static_cast<intptr_t>(handle)); }
edgespec_bundle* bundle_of(int64_t handle) { return reinterpret_cast<edgespec_bundle*>(static_cast<intptr_t>(handle)); }
int64_t handle_of(const void* made) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(made)); }

int on_read(void* user, int64_t tokens, int64_t total) {
  const auto& session = *static_cast<const Session*>(user);
  Value given[2]{};
  given[0].whole = tokens;
  given[1].whole = total;
  const bool goes_on = call<uint8_t>(calling, kCallBooleanMethodA, session.watch->object(), session.read,
                                     static_cast<const Value*>(given)) != 0;
  return thrown(calling) || !goes_on;
}

int on_mask(void* user, const int64_t* text, int64_t count, const int64_t* path, int32_t path_count,
            const float* logits, int64_t columns, uint8_t* allowed) {
  const auto& session = *static_cast<const Session*>(user);
  std::vector<int32_t> prefix(text, text + count);
  prefix.insert(prefix.end(), path, path + path_count);
  Value given[2]{};
  given[0].object = ints_of(calling, prefix);
  if (!given[0].object) return 1;
  given[1].object = array_of(calling, kNewFloatArray, kSetFloatArrayRegion, logits, static_cast<size_t>(columns));
  if (!given[1].object) return 1;
  const Object found = call<Object>(calling, kCallObjectMethodA, session.watch->object(), session.allowed,
                                    static_cast<const Value*>(given));
  for (const Value& one : given) call<void>(calling, kDeleteLocalRef, one.object);
  std::vector<uint8_t> mask(static_cast<size_t>(columns));
  size_t size = 0;
  if (answer<uint8_t>(found, kGetBooleanArrayRegion, mask.data(), mask.size(), &size)) return 1;
  for (size_t i = 0; i < mask.size(); ++i) allowed[i] = mask[i] != 0;  // beyond the array's end nothing is
  return 0;
}

}  // namespace

// Why the last call of this thread that failed did: its status, and UTF-8.
EDGESPEC_JNI(int32_t, status)(Env, Object) { return failed; }
EDGESPEC_JNI(Object, error)(Env env, Object) {
  const char* said = edgespec_error();
  return bytes_of(env, said, std::strlen(said));
}

EDGESPEC_JNI(Object, isa)(Env env, Object) {
  const char* name = edgespec_isa();
  return bytes_of(env, name, std::strlen(name));
}
EDGESPEC_JNI(int32_t, version)(Env, Object) { return static_cast<int32_t>(edgespec_c_version()); }

// Texts are arrays of bytes in UTF-8.  Handles: 0 where a call failed.
EDGESPEC_JNI(int64_t, open)(Env env, Object, Object folder, int32_t threads) {
  edgespec_bundle* made = nullptr;
  return done(edgespec_bundle_open(text_of(env, folder).c_str(), threads, &made)) ? handle_of(made) : 0;
}

EDGESPEC_JNI(int64_t, openHosted)(Env env, Object, Object folder) {
  edgespec_bundle* made = nullptr;
  return done(edgespec_bundle_open_hosted(text_of(env, folder).c_str(), &made)) ? handle_of(made) : 0;
}

EDGESPEC_JNI(void, close)(Env env, Object, int64_t bundle) {
  const Call own(env);
  edgespec_bundle_close(bundle_of(bundle));
}

// The number of a LoRA adapter in a folder; 0: it cannot be added.
EDGESPEC_JNI(int32_t, addAdapter)(Env env, Object, int64_t bundle, Object folder) {
  int32_t number = 0;
  return done(edgespec_bundle_add_adapter(bundle_of(bundle), text_of(env, folder).c_str(), &number)) ? number : 0;
}

EDGESPEC_JNI(void, limit)(Env, Object, int64_t bundle, int32_t threads) {
  done(edgespec_bundle_limit(bundle_of(bundle), threads));
}

// [context, vocab, tokens that end a text]
EDGESPEC_JNI(Object, describe)(Env env, Object, int64_t bundle) {
  edgespec_bundle_facts facts = EDGESPEC_INIT(edgespec_bundle_facts);
  if (!done(edgespec_bundle_describe(bundle_of(bundle), &facts))) return nullptr;
  std::vector<int32_t> found{
      static_cast<int32_t>(std::min<int64_t>(facts.context, std::numeric_limits<int32_t>::max())),
      static_cast<int32_t>(facts.vocab)};
  found.insert(found.end(), facts.stops, facts.stops + facts.stop_count);
  return ints_of(env, found);
}

// The tokenizer's library at a path, by its name for null.
EDGESPEC_JNI(uint8_t, loadCodec)(Env env, Object, int64_t bundle, Object path) {
  return done(edgespec_bundle_load_codec(bundle_of(bundle), path ? text_of(env, path).c_str() : nullptr));
}

EDGESPEC_JNI(uint8_t, setCodec)(Env env, Object, int64_t bundle, Object codec) {
  const Call own(env);
  auto made = std::unique_ptr<AppCodec>(new AppCodec{{env, codec}, nullptr, nullptr, nullptr});
  made->encode = made->callee.find(env, "encode", "([BZ)[I");
  made->decode = made->encode ? made->callee.find(env, "decode", "([I)[B") : nullptr;
  made->close = made->decode ? made->callee.find(env, "close", "()V") : nullptr;
  if (!made->close) return false;
  edgespec_codec given = EDGESPEC_INIT(edgespec_codec);
  given.user = made.get();
  given.encode = encode_by_app;
  given.decode = decode_by_app;
  given.close = close_app;
  if (!done(edgespec_bundle_set_codec(bundle_of(bundle), &given))) return false;
  made.release();
  return true;
}

EDGESPEC_JNI(Object, encode)(Env env, Object, int64_t bundle, Object text, uint8_t special) {
  const Call own(env);
  const std::string given = text_of(env, text);
  std::vector<int64_t> found(given.size() + 16);
  for (size_t count = 0;; found.resize(count)) {
    if (!done(edgespec_encode(bundle_of(bundle), given.data(), given.size(), special, found.data(), found.size(),
                              &count)))
      return nullptr;
    if (count <= found.size()) return ints_of(env, found.data(), count);
  }
}

EDGESPEC_JNI(Object, decode)(Env env, Object, int64_t bundle, Object tokens) {
  const Call own(env);
  const std::vector<int64_t> given = tokens_of(env, tokens);
  std::vector<char> found(8 * given.size() + 16);
  for (size_t size = 0;; found.resize(size)) {
    if (!done(edgespec_decode(bundle_of(bundle), given.data(), given.size(), found.data(), found.size(), &size)))
      return nullptr;
    if (size <= found.size()) return bytes_of(env, found.data(), size);
  }
}

// messages: JSON objects; more: JSON, or null.
EDGESPEC_JNI(Object, encodeChat)(Env env, Object, int64_t bundle, Object messages, Object more) {
  const Call own(env);
  const std::vector<std::string> given = texts_of(env, messages);
  const std::string options = text_of(env, more);
  std::vector<edgespec_message> all;
  for (const std::string& one : given) all.push_back({nullptr, one.c_str()});
  std::vector<int64_t> found(4096);
  for (size_t count = 0;; found.resize(count)) {
    if (!done(edgespec_encode_chat(bundle_of(bundle), all.data(), static_cast<int32_t>(all.size()),
                                   more ? options.c_str() : nullptr, found.data(), found.size(), &count)))
      return nullptr;
    if (count <= found.size()) return ints_of(env, found.data(), count);
  }
}

// store: a path, or null; target, draft: models whose passes Java runs, or null.
EDGESPEC_JNI(int64_t, sessionOpen)(Env env, Object, int64_t bundle, int32_t attention, int64_t context, int64_t bytes,
                                   Object store, Object target, Object draft) {
  const std::string path = text_of(env, store);
  edgespec_session_options options = EDGESPEC_INIT(edgespec_session_options);
  edgespec_host of_target{}, of_draft{};
  auto made = std::unique_ptr<Session>(new Session);
  made->target = host_of(env, target, of_target);
  if (made->target && !made->target->run) return 0;
  made->draft = host_of(env, draft, of_draft);
  options.attention = attention;
  options.context = context;
  options.max_bytes = static_cast<uint64_t>(bytes);
  options.ngram_store = store ? path.c_str() : nullptr;
  options.target = target ? &of_target : nullptr;
  options.draft = draft ? &of_draft : nullptr;
  return done(edgespec_session_open(bundle_of(bundle), &options, &made->session)) ? handle_of(made.release()) : 0;
}

EDGESPEC_JNI(void, sessionClose)(Env env, Object, int64_t session) {
  const Call own(env);
  const std::unique_ptr<Session> closed(session_of(session));
  if (closed) edgespec_session_close(closed->session);
}

EDGESPEC_JNI(int64_t, sessionBytes)(Env, Object, int64_t session) {
  return static_cast<int64_t>(edgespec_session_bytes(session_of(session)->session));
}

EDGESPEC_JNI(uint8_t, save)(Env env, Object, int64_t session, Object path) {
  return done(edgespec_session_save(session_of(session)->session, text_of(env, path).c_str()));
}

EDGESPEC_JNI(uint8_t, restore)(Env env, Object, int64_t session, Object path) {
  return done(edgespec_session_restore(session_of(session)->session, text_of(env, path).c_str(), nullptr));
}

// Begins a text.  numbers, reals: of edgespec_settings, in the order that Native.kt says; watch: receives the prompt's
// reading, and asked for tokens that may follow if it `masks`.  Arrays may be null.
EDGESPEC_JNI(uint8_t, begin)(Env env, Object, int64_t handle, Object prompt, Object method, Object numbers,
                             Object reals, Object bias_tokens, Object biases, Object branch, Object prediction,
                             Object stop_texts, Object watch, uint8_t masks) {
  const Call own(env);
  Session& session = *session_of(handle);
  const std::vector<int64_t> tokens = tokens_of(env, prompt), given = read<int64_t>(env, kGetLongArrayRegion, numbers),
                             bias = tokens_of(env, bias_tokens), expected = tokens_of(env, prediction);
  const std::vector<double> real = read<double>(env, kGetDoubleArrayRegion, reals),
                            added = read<double>(env, kGetDoubleArrayRegion, biases);
  const std::vector<int32_t> tree = read<int32_t>(env, kGetIntArrayRegion, branch);
  const std::string name = text_of(env, method);
  const std::vector<std::string> stops = texts_of(env, stop_texts);
  std::vector<const char*> ends;
  for (const std::string& one : stops) ends.push_back(one.c_str());

  edgespec_settings settings = EDGESPEC_INIT(edgespec_settings);
  size_t at = 0;
  const auto next = [&] { return static_cast<int32_t>(given.at(at++)); };
  settings.max_new_tokens = given.at(at++);
  settings.seed = given.at(at++);
  settings.seeded = next();
  settings.guesses = next();
  settings.ignore_eos = next();
  settings.top_k = next();
  settings.coupled = next();
  settings.block = next();
  settings.logprobs = next();
  settings.top_logprobs = next();
  settings.fixed = next();
  settings.nodes = next();
  settings.cycles = next();
  settings.adapter = next();
  settings.temperature = real.at(0);
  settings.top_p = real.at(1);
  settings.min_p = real.at(2);
  settings.repetition_penalty = real.at(3);
  settings.presence_penalty = real.at(4);
  settings.frequency_penalty = real.at(5);
  settings.method = method ? name.c_str() : nullptr;
  settings.bias_tokens = bias.data();
  settings.biases = added.data();
  settings.bias_count = static_cast<int32_t>(std::min(bias.size(), added.size()));
  settings.branch = tree.data();
  settings.branch_count = static_cast<int32_t>(tree.size());
  settings.prediction = expected.data();
  settings.prediction_count = static_cast<int64_t>(expected.size());
  settings.stop_texts = ends.data();
  settings.stop_text_count = static_cast<int32_t>(ends.size());
  session.watch = std::unique_ptr<Callee>(new Callee(env, watch));
  session.read = session.watch->find(env, "read", "(JJ)Z");
  session.allowed = session.read ? session.watch->find(env, "allowed", "([I[F)[Z") : nullptr;
  if (!session.allowed) return false;
  settings.progress = on_read;
  settings.mask = masks ? on_mask : nullptr;
  settings.user = &session;
  return done(edgespec_begin(session.session, tokens.data(), static_cast<int64_t>(tokens.size()), &settings));
}

// Runs a round -> [int [finish, accepted, tokens, drafted, rejected, top, and then those numbers of each], text or
// null, drafter, logprobs or null, top log-probabilities or null]
EDGESPEC_JNI(Object, next)(Env env, Object, int64_t handle) {
  const Call own(env);
  edgespec_round round = EDGESPEC_INIT(edgespec_round);
  if (!done(edgespec_next(session_of(handle)->session, &round))) return nullptr;
  std::vector<int32_t> numbers{round.finish,        round.accepted,       round.count,
                               round.drafted_count, round.rejected_count, round.top_count};
  numbers.insert(numbers.end(), round.tokens, round.tokens + round.count);
  numbers.insert(numbers.end(), round.drafted, round.drafted + round.drafted_count);
  numbers.insert(numbers.end(), round.rejected, round.rejected + round.rejected_count);
  const auto count = static_cast<size_t>(round.count), top = count * static_cast<size_t>(round.top_count);
  if (round.top_ids) numbers.insert(numbers.end(), round.top_ids, round.top_ids + top);
  const Object parts[] = {ints_of(env, numbers), round.text ? bytes_of(env, round.text, round.text_size) : nullptr,
                          bytes_of(env, round.drafter, std::strlen(round.drafter)),
                          doubles_of(env, round.logprobs, count), doubles_of(env, round.top_logprobs, top)};
  const Object type = call<Object>(env, kFindClass, static_cast<const char*>("java/lang/Object"));
  const auto size = static_cast<int32_t>(sizeof parts / sizeof *parts);
  const Object found = call<Object>(env, kNewObjectArray, size, type, Object{});
  for (int32_t i = 0; found && i < size; ++i)
    call<void>(env, kSetObjectArrayElement, found, i, parts[static_cast<size_t>(i)]);
  return found;
}

// From any thread.
EDGESPEC_JNI(void, cancel)(Env, Object, int64_t session) { edgespec_cancel(session_of(session)->session); }

// [prompt tokens, reused tokens, and nanoseconds: of the prompt, of rounds, of passes in rounds]
EDGESPEC_JNI(Object, counts)(Env env, Object, int64_t session) {
  edgespec_counts counts = EDGESPEC_INIT(edgespec_counts);
  if (!done(edgespec_session_counts(session_of(session)->session, &counts))) return nullptr;
  const std::vector<int64_t> found{counts.prompt_tokens, counts.reused_tokens, static_cast<int64_t>(counts.prompt_ns),
                                   static_cast<int64_t>(counts.round_ns), static_cast<int64_t>(counts.pass_ns)};
  return array_of(env, kNewLongArray, kSetLongArrayRegion, found.data(), found.size());
}

// Drafters that failed, and why, a line each.
EDGESPEC_JNI(Object, dropped)(Env env, Object, int64_t session) {
  edgespec_counts counts = EDGESPEC_INIT(edgespec_counts);
  if (!done(edgespec_session_counts(session_of(session)->session, &counts))) return nullptr;
  return bytes_of(env, counts.dropped, std::strlen(counts.dropped));
}
