#include "codec.h"

#include "json.h"
#include "shared_library.h"

namespace edgespec {
namespace {

#ifdef _WIN32
constexpr char kName[] = "edgespec_tokenizer.dll";
#elif defined(__APPLE__)
constexpr char kName[] = "libedgespec_tokenizer.dylib";
#else
constexpr char kName[] = "libedgespec_tokenizer.so";
#endif

constexpr size_t kMost = size_t(1) << 30;  // tokens, or bytes of a text

void append_json(std::string& out, const char* text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  out += '"';
  for (; *text; ++text) {
    const auto one = static_cast<uint8_t>(*text);
    if (one == '"' || one == '\\') out += '\\';
    if (one < 32) {
      out += "\\u00";
      out += kDigits[one >> 4];
      out += kDigits[one & 15];
    } else {
      out += *text;
    }
  }
  out += '"';
}

}  // namespace

std::string conversation_of(const edgespec_message* messages, int32_t count, const char* more) {
  if (count < 1 || !messages) refuse("expected a conversation of at least one message");
  std::string out = "{\"messages\": [";
  for (int32_t i = 0; i < count; ++i) {
    const edgespec_message& one = messages[i];
    if (!one.content) refuse("a message without content");
    if (i) out += ", ";
    if (!one.role) {  // the content is the whole message
      out += one.content;
      continue;
    }
    out += "{\"role\": ";
    append_json(out, one.role);
    out += ", \"content\": ";
    append_json(out, one.content);
    out += '}';
  }
  out += ']';
  if (more) {
    const std::string fields = more;
    const size_t begin = fields.find('{'), end = fields.rfind('}');
    if (begin == std::string::npos || end == std::string::npos || end < begin)
      refuse("expected tools and options as a JSON object");
    const std::string inner = fields.substr(begin + 1, end - begin - 1);
    if (inner.find_first_not_of(" \t\r\n") != std::string::npos) out += ", " + inner;
  }
  return out + '}';
}

// Calls a function that says how much it has, again where it has more than the room that there was.
template <class T, class Call>
T Codec::filled(const char* name, size_t room, Call call) const {
  T found;
  for (bool again = false;; again = true) {
    found.resize(room);
    size_t count = 0;
    if (call(found.data(), room, &count)) {
      const char* why = functions_.error ? functions_.error() : nullptr;
      refuse(std::string(name) + ": " + (why ? why : "refused"));
    }
    if (count <= room) return found.resize(count), found;
    if (again || count > kMost) refuse(std::string(name) + ": it does not say how much it has");
    room = count;
  }
}

std::vector<int64_t> Codec::encode(const std::string& text, bool special) const {
  if (!functions_.encode) refuse("the codec encodes no text");
  return filled<std::vector<int64_t>>("encode", text.size() / 3 + 16, [&](int64_t* ids, size_t room, size_t* count) {
    return functions_.encode(functions_.user, text.data(), text.size(), special, ids, room, count);
  });
}

std::vector<int64_t> Codec::encode_chat(const std::string& conversation) const {
  if (!functions_.encode_chat) refuse("the codec encodes no conversation");
  return filled<std::vector<int64_t>>(
      "encode_chat", conversation.size() / 2 + 64, [&](int64_t* ids, size_t room, size_t* count) {
        return functions_.encode_chat(functions_.user, conversation.data(), conversation.size(), ids, room, count);
      });
}

std::string Codec::decode(const int64_t* ids, size_t count) const {
  if (!functions_.decode) refuse("the codec decodes no tokens");
  return filled<std::string>("decode", 8 * count + 16, [&](char* text, size_t room, size_t* size) {
    return functions_.decode(functions_.user, ids, count, text, room, size);
  });
}

std::unique_ptr<Codec> Codec::load(const std::string& folder, const std::string& path) {
  const SharedLibrary library(path.empty() ? kName : path);
  edgespec_codec made{};
  made.size = sizeof made;
  int (*open)(const char*, void**) = nullptr;
  library.find("edgespec_tokenizer_open_folder", open);
  library.find("edgespec_tokenizer_error", made.error);
  library.find("edgespec_tokenizer_encode", made.encode);
  library.find("edgespec_tokenizer_encode_chat", made.encode_chat);
  library.find("edgespec_tokenizer_decode", made.decode);
  library.find("edgespec_tokenizer_close", made.close);
  if (open(folder.c_str(), &made.user)) refuse(made.error());
  return std::make_unique<Codec>(made);
}

}  // namespace edgespec
