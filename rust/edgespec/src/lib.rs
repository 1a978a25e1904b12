//! Native edgespec bundles: quantized language models with lossless speculative decoding.
//!
//! A [`Bundle`] is a folder that `edgespec export` made. A [`Session`] has one text and the memory of its models. It
//! reads and writes token ids. With a codec ([`Bundle::load_codec`]) it also chats, and rounds have text.
//!
//! ```no_run
//! let bundle = edgespec::Bundle::open("my-bundle", 0)?;
//! let mut session = bundle.session(&Default::default())?;
//! let settings = edgespec::Settings { max_new_tokens: Some(64), ..Default::default() };
//! for round in session.begin(&[344, 201, 77], &settings)? {
//!     println!("{:?}", round?.tokens);
//! }
//! # Ok::<(), edgespec::Error>(())
//! ```
use std::ffi::{c_char, c_int, CStr, CString};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr::{null, null_mut, NonNull};
use std::sync::{Arc, Weak};
use std::{error, fmt, slice};

use edgespec_sys as sys;

/// What kind of failure a call had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A file or an argument; nothing has changed.
    Refused,
    NoMemory,
    /// The text was cancelled.
    Cancelled,
    /// The prompt leaves no room in the context.
    Full,
    /// A file that is not there, or a bundle without graphs of native operators.
    NoFile,
    /// The model gives NaN or infinity.
    Broken,
}

/// Why a call failed, in the library's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: Kind,
    text: String,
}

impl Error {
    pub fn kind(&self) -> Kind {
        self.kind
    }

    fn refused(text: String) -> Self {
        Self { kind: Kind::Refused, text }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.text)
    }
}

impl error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

/// The instruction set of the kernels on this machine.
pub fn isa() -> String {
    // SAFETY: a string that stays.
    unsafe { text(sys::edgespec_isa()) }
}

/// The library's version.
pub fn version() -> String {
    // SAFETY: a string that stays.
    unsafe { text(sys::edgespec_version()) }
}

/// # Safety
/// `words` is null, or ends with a zero and stays during the call.
unsafe fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    CStr::from_ptr(words).to_string_lossy().into_owned()
}

/// # Safety
/// `data` is null, or has `count` values that stay during the call.
unsafe fn copied<T: Copy>(data: *const T, count: impl TryInto<usize>) -> Vec<T> {
    match count.try_into() {
        Ok(count) if !data.is_null() => slice::from_raw_parts(data, count).to_vec(),
        _ => Vec::new(),
    }
}

fn checked(status: c_int) -> Result<()> {
    let kind = match status {
        sys::OK => return Ok(()),
        sys::NO_MEMORY => Kind::NoMemory,
        sys::CANCELLED => Kind::Cancelled,
        sys::FULL => Kind::Full,
        sys::NO_FILE => Kind::NoFile,
        sys::BROKEN => Kind::Broken,
        _ => Kind::Refused,
    };
    // SAFETY: this thread's own text, which its next call replaces.
    Err(Error { kind, text: unsafe { text(sys::edgespec_error()) } })
}

fn c_path(path: &Path) -> Result<CString> {
    let words = path.to_str().and_then(|words| CString::new(words).ok());
    words.ok_or_else(|| Error::refused(format!("{}: expected a path in UTF-8, without zeros", path.display())))
}

fn c_text(words: &str, name: &str) -> Result<CString> {
    CString::new(words).map_err(|_| Error::refused(format!("{name}: expected a text without zeros")))
}

/// Calls a function that writes to `room` values and says how many there are, again where there are more.
fn filled<T: Copy + Default>(mut call: impl FnMut(*mut T, usize, &mut usize) -> c_int) -> Result<Vec<T>> {
    let mut found = vec![T::default(); 512];
    loop {
        let mut count = 0;
        checked(call(found.as_mut_ptr(), found.len(), &mut count))?;
        let whole = count <= found.len();
        found.resize(count, T::default());
        if whole {
            return Ok(found);
        }
    }
}

/// Null where there is no text; else it stays while `words` does.
fn pointer(words: &Option<CString>) -> *const c_char {
    words.as_ref().map_or(null(), |words| words.as_ptr())
}

/// A value that is more than zero, which is the default in C.
fn positive<T: PartialOrd + Default + fmt::Display>(value: Option<T>, name: &str) -> Result<T> {
    match value {
        None => Ok(T::default()),
        Some(value) if value > T::default() => Ok(value),
        Some(value) => Err(Error::refused(format!("{name} {value}: expected more than 0; None is the default"))),
    }
}

fn count<T>(values: &[T], name: &str) -> Result<i32> {
    i32::try_from(values.len()).map_err(|_| Error::refused(format!("{name}: too many")))
}

struct BundleHandle(NonNull<sys::Bundle>);

// SAFETY: calls that change a bundle need it alone (`Bundle::alone`), except for its limit of threads, which any thread
// may set. The library lets sessions of several threads share it.
unsafe impl Send for BundleHandle {}
unsafe impl Sync for BundleHandle {}

impl Drop for BundleHandle {
    fn drop(&mut self) {
        // SAFETY: opened, and closed once.
        unsafe { sys::edgespec_bundle_close(self.0.as_ptr()) }
    }
}

/// What a bundle is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Maximum tokens of a text, prompt included.
    pub context: i64,
    pub vocab: i64,
    /// Tokens that end a text.
    pub stops: Vec<i64>,
    pub has_draft: bool,
}

/// An opened bundle; clones share it.
#[derive(Clone)]
pub struct Bundle(Arc<BundleHandle>);

impl Bundle {
    /// Open a folder. `threads` of passes, the caller's included; 0: as many as there are processors.
    pub fn open(folder: impl AsRef<Path>, threads: u16) -> Result<Self> {
        let threads = threads.into();
        // SAFETY: the path ends with a zero, and the bundle is written where the call succeeds.
        Self::opened(folder.as_ref(), |path, made| unsafe { sys::edgespec_bundle_open(path, threads, made) })
    }

    /// Open a folder whose target is larger than the memory: `cache` bytes hold some of its weights, and the others are
    /// read when a pass needs them. The text is the same.
    pub fn open_streamed(folder: impl AsRef<Path>, threads: u16, cache: u64) -> Result<Self> {
        let threads = threads.into();
        // SAFETY: as of `open`.
        Self::opened(folder.as_ref(), |path, made| unsafe {
            sys::edgespec_bundle_open_streamed(path, threads, cache, made)
        })
    }

    fn opened(folder: &Path, open: impl FnOnce(*const c_char, *mut *mut sys::Bundle) -> c_int) -> Result<Self> {
        // SAFETY: a number.
        let version = unsafe { sys::edgespec_c_version() };
        if version < sys::C_VERSION {
            let wanted = sys::C_VERSION;
            return Err(Error::refused(format!("a library of interface {version}: expected {wanted} or later")));
        }
        let (path, mut made) = (c_path(folder)?, null_mut());
        checked(open(path.as_ptr(), &mut made))?;
        Ok(Self(Arc::new(BundleHandle(NonNull::new(made).expect("a bundle")))))
    }

    /// Load the tokenizer's library, for text: once, before there are sessions and clones. None: the system finds
    /// `libedgespec_tokenizer.so`, `libedgespec_tokenizer.dylib` or `edgespec_tokenizer.dll`.
    ///
    /// # Safety
    /// The file is the tokenizer's library: whatever it is, its code runs.
    pub unsafe fn load_codec(&mut self, path: Option<&Path>) -> Result<()> {
        let path = path.map(c_path).transpose()?;
        checked(sys::edgespec_bundle_load_codec(self.alone("a codec")?, pointer(&path)))
    }

    /// Add a LoRA adapter, a folder that PEFT saved, for [`Settings::adapter`], before there are sessions and clones.
    pub fn add_adapter(&mut self, folder: impl AsRef<Path>) -> Result<Adapter> {
        let (path, mut number) = (c_path(folder.as_ref())?, 0);
        let bundle = self.alone("an adapter")?;
        // SAFETY: nothing else has the bundle, and the path ends with a zero.
        checked(unsafe { sys::edgespec_bundle_add_adapter(bundle, path.as_ptr(), &mut number) })?;
        Ok(Adapter(number))
    }

    /// The bundle that is to be changed, which nothing else has.
    fn alone(&mut self, what: &str) -> Result<*mut sys::Bundle> {
        let found = Arc::get_mut(&mut self.0);
        let handle =
            found.ok_or_else(|| Error::refused(format!("{what}: expected a bundle without sessions and clones")));
        Ok(handle?.0.as_ptr())
    }

    /// Limit the threads of later passes, at least 1, such as on a hot device. No result changes.
    pub fn limit_threads(&self, threads: u16) -> Result<()> {
        // SAFETY: the bundle is open, and any thread may call this.
        checked(unsafe { sys::edgespec_bundle_limit(self.raw(), threads.into()) })
    }

    /// The tokens of a text; `special`: with what the tokenizer puts around it, such as the token that begins a text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<i64>> {
        let (bundle, data, special) = (self.raw(), text.as_ptr().cast(), special.into());
        // SAFETY: text and ids have the given sizes.
        filled(|ids, room, count| unsafe { sys::edgespec_encode(bundle, data, text.len(), special, ids, room, count) })
    }

    /// The text of tokens, without special ones.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        let (bundle, data) = (self.raw(), tokens.as_ptr());
        // SAFETY: tokens and text have the given sizes.
        let text: Vec<u8> = filled(|text: *mut u8, room, size| unsafe {
            sys::edgespec_decode(bundle, data, tokens.len(), text.cast(), room, size)
        })?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// The tokens of a conversation by the model's template, ready for the answer. `more`: a JSON object with `tools`,
    /// `options` of the template, `generation_prompt` and `continue_final` (true: the answer continues the last message).
    pub fn encode_chat(&self, messages: &[Message], more: Option<&str>) -> Result<Vec<i64>> {
        let of = |message: &Message| -> Result<_> {
            let role = message.role.as_deref().map(|role| c_text(role, "role")).transpose()?;
            Ok((role, c_text(&message.content, "content")?))
        };
        let words = messages.iter().map(of).collect::<Result<Vec<_>>>()?;
        let given: Vec<_> = words
            .iter()
            .map(|(role, content)| sys::Message { role: pointer(role), content: content.as_ptr() })
            .collect();
        let more = more.map(|more| c_text(more, "more")).transpose()?;
        let (bundle, number) = (self.raw(), count(&given, "messages")?);
        // SAFETY: all texts end with a zero, and ids have the given size.
        filled(|ids, room, count| unsafe {
            sys::edgespec_encode_chat(bundle, given.as_ptr(), number, pointer(&more), ids, room, count)
        })
    }

    fn raw(&self) -> *mut sys::Bundle {
        self.0 .0.as_ptr()
    }

    pub fn facts(&self) -> Result<Facts> {
        let mut found = sys::BundleFacts::init();
        // SAFETY: the structure says its size; what it points to is the bundle's.
        unsafe {
            checked(sys::edgespec_bundle_describe(self.raw(), &mut found))?;
            Ok(Facts {
                context: found.context,
                vocab: found.vocab,
                stops: copied(found.stops, found.stop_count),
                has_draft: found.has_draft != 0,
            })
        }
    }

    /// Make a session, whose text is empty.
    pub fn session(&self, options: &SessionOptions) -> Result<Session> {
        let store = options.ngram_store.as_deref().map(c_path).transpose()?;
        let given = sys::SessionOptions {
            attention: match options.attention {
                None => 0,
                Some(Attention::F32) => sys::ATTENTION_F32,
                Some(Attention::F16) => sys::ATTENTION_F16,
                Some(Attention::Int8) => sys::ATTENTION_INT8,
            },
            context: positive(options.context, "context")?,
            ngram_store: pointer(&store),
            max_bytes: positive(options.max_bytes, "max_bytes")?,
            ..sys::SessionOptions::init()
        };
        let mut made = null_mut();
        // SAFETY: the bundle is open, `given` and its path stay during the call.
        checked(unsafe { sys::edgespec_session_open(self.raw(), &given, &mut made) })?;
        let handle = SessionHandle { raw: NonNull::new(made).expect("a session"), bundle: self.clone() };
        Ok(Session { handle: Arc::new(handle), _one_thread: PhantomData })
    }
}

impl fmt::Debug for Bundle {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_tuple("Bundle").finish_non_exhaustive()
    }
}

/// How a session keeps keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    F32,
    F16,
    Int8,
}

/// Options of a session; None: the bundle's, or no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    pub attention: Option<Attention>,
    /// Maximum tokens of its text.
    pub context: Option<i64>,
    /// A file of `edgespec ngram build`.
    pub ngram_store: Option<std::path::PathBuf>,
    /// Maximum bytes of the caches of the target and the draft.
    pub max_bytes: Option<u64>,
}

/// Settings of a text, those of Python. The default decodes greedily with the method that is predicted to be fastest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `plain`, `ngram`, `speculative` or another one of the bundle, or several with commas between. None: `auto`.
    pub method: Option<String>,
    /// Maximum guesses of a round.
    pub guesses: Option<u8>,
    /// None: to the end of the context.
    pub max_new_tokens: Option<i64>,
    /// Tokens that end the text, besides the bundle's.
    pub stops: Vec<i64>,
    pub ignore_eos: bool,
    /// 0: greedy.
    pub temperature: f64,
    pub top_k: i64,
    pub top_p: Option<f64>,
    pub min_p: f64,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: f64,
    pub frequency_penalty: f64,
    /// Tokens and what is added to their logits; negative infinity forbids one.
    pub logit_bias: Vec<(i64, f64)>,
    pub seed: Option<i64>,
    /// Sampled texts are plain decoding's; otherwise more guesses are accepted, by rejection sampling.
    pub coupled: bool,
    /// Rejection judges a chain of guesses as a whole.
    pub block: bool,
    /// Children of each guess of a tree, by depth.
    pub branch: Vec<i32>,
    pub logprobs: bool,
    /// Every round has `guesses` guesses, where there are any.
    pub fixed: bool,
    /// Tokens of a text that is expected, such as a file before an edit.
    pub prediction: Vec<i64>,
    /// Texts that end the text, of which they are no part. They need a codec.
    pub stop_texts: Vec<String>,
    /// `medusa`: guesses of its tree; 0: as many as are predicted to be fastest.
    pub nodes: i32,
    /// `blockwise`: passes that refine a block before it is verified.
    pub cycles: i32,
    /// Rounds have the log-probabilities of this many of the likeliest tokens, at most 20.
    pub top_logprobs: i32,
    /// None: the model as it is.
    pub adapter: Option<Adapter>,
}

/// An adapter of a bundle ([`Bundle::add_adapter`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adapter(i32);

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    role: Option<String>,
    content: String,
}

impl Message {
    /// `role`: system, user, assistant or tool.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: Some(role.into()), content: content.into() }
    }

    /// A whole message, a JSON object, such as one with calls of tools.
    pub fn json(object: impl Into<String>) -> Self {
        Self { role: None, content: object.into() }
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By a token that ends it, its last one.
    Stop,
    /// `max_new_tokens` are there.
    Length,
    /// The context is full.
    Context,
    /// By a text of `stop_texts`, which the last token completes.
    StopText,
}

/// One pass of the target, and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// The new ones, at least one.
    pub tokens: Vec<i64>,
    /// All guesses.
    pub drafted: Vec<i64>,
    /// Guesses that would have followed the accepted ones.
    pub rejected: Vec<i64>,
    /// How many of `tokens` were guesses, the first ones.
    pub accepted: usize,
    /// Who guessed; empty without guesses.
    pub drafter: String,
    /// Of each token, where settings ask for them.
    pub logprobs: Vec<f64>,
    /// The likeliest tokens in the place of each and their log-probabilities, the likeliest first, where settings ask
    /// for them.
    pub top_logprobs: Vec<Vec<(i64, f64)>>,
    /// What the tokens add to the text, in whole characters; empty without a codec.
    pub text: String,
    /// None: the text continues.
    pub finish: Option<Finish>,
}

/// Sums of a session's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt_tokens: i64,
    /// Tokens of the prompt that were not read again.
    pub reused_tokens: i64,
    pub rounds: i64,
    pub tokens: i64,
    pub drafted: i64,
    pub accepted: i64,
    pub prompt_ns: u64,
    pub round_ns: u64,
    /// Of passes in rounds.
    pub pass_ns: u64,
    /// Drafters that failed, and why, a line each.
    pub dropped: String,
}

struct SessionHandle {
    raw: NonNull<sys::Session>,
    bundle: Bundle,
}

// SAFETY: a session may move between threads. It is shared with `Canceller`s alone, whose only call may come from any
// thread; everything else needs `&mut Session`, or `&Session` in its one thread.
unsafe impl Send for SessionHandle {}
unsafe impl Sync for SessionHandle {}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        // SAFETY: opened, and closed once, by the last that has it.
        unsafe { sys::edgespec_session_close(self.raw.as_ptr()) }
    }
}

/// One text, and the memory of its models. It may move to another thread, but is not shared between threads.
pub struct Session {
    handle: Arc<SessionHandle>,
    _one_thread: PhantomData<std::cell::Cell<()>>,
}

impl Session {
    /// Begin a text: read the prompt, of which the session may know the beginning from its text before. The iterator
    /// runs a round at a time, to the end of the text or the first error.
    pub fn begin(&mut self, prompt: &[i64], settings: &Settings) -> Result<Text<'_>> {
        let method = settings.method.as_deref().map(|name| c_text(name, "method")).transpose()?;
        let ends = settings.stop_texts.iter().map(|text| c_text(text, "stop_texts")).collect::<Result<Vec<_>>>()?;
        let stop_texts: Vec<_> = ends.iter().map(|text| text.as_ptr()).collect();
        let (bias_tokens, biases): (Vec<i64>, Vec<f64>) = settings.logit_bias.iter().copied().unzip();
        let given = sys::Settings {
            guesses: positive(settings.guesses, "guesses")?.into(),
            max_new_tokens: positive(settings.max_new_tokens, "max_new_tokens")?,
            method: pointer(&method),
            stops: settings.stops.as_ptr(),
            stop_count: count(&settings.stops, "stops")?,
            ignore_eos: settings.ignore_eos.into(),
            temperature: settings.temperature,
            top_k: settings.top_k,
            top_p: positive(settings.top_p, "top_p")?,
            min_p: settings.min_p,
            repetition_penalty: positive(settings.repetition_penalty, "repetition_penalty")?,
            presence_penalty: settings.presence_penalty,
            frequency_penalty: settings.frequency_penalty,
            bias_tokens: bias_tokens.as_ptr(),
            biases: biases.as_ptr(),
            bias_count: count(&biases, "logit_bias")?,
            seeded: settings.seed.is_some().into(),
            seed: settings.seed.unwrap_or(0),
            coupled: settings.coupled.into(),
            block: settings.block.into(),
            branch: settings.branch.as_ptr(),
            branch_count: count(&settings.branch, "branch")?,
            logprobs: settings.logprobs.into(),
            fixed: settings.fixed.into(),
            prediction: settings.prediction.as_ptr(),
            prediction_count: count(&settings.prediction, "prediction")?.into(),
            stop_texts: stop_texts.as_ptr(),
            stop_text_count: count(&stop_texts, "stop_texts")?,
            nodes: settings.nodes,
            cycles: settings.cycles,
            top_logprobs: settings.top_logprobs,
            adapter: settings.adapter.map_or(0, |adapter| adapter.0),
            ..sys::Settings::init()
        };
        // SAFETY: all that `given` points to stays during the call, which copies what it keeps.
        checked(unsafe { sys::edgespec_begin(self.raw(), prompt.as_ptr(), prompt.len() as i64, &given) })?;
        Ok(Text { session: self, ended: false })
    }

    /// Begin the answer of a conversation: [`Bundle::encode_chat`], and [`Self::begin`].
    pub fn chat(&mut self, messages: &[Message], more: Option<&str>, settings: &Settings) -> Result<Text<'_>> {
        let prompt = self.handle.bundle.encode_chat(messages, more)?;
        self.begin(&prompt, settings)
    }

    /// Sums of the text that was begun last.
    pub fn counts(&self) -> Result<Counts> {
        let mut found = sys::Counts::init();
        // SAFETY: the structure says its size; its text is the session's until its next call.
        unsafe {
            checked(sys::edgespec_session_counts(self.raw(), &mut found))?;
            Ok(Counts {
                prompt_tokens: found.prompt_tokens,
                reused_tokens: found.reused_tokens,
                rounds: found.rounds,
                tokens: found.tokens,
                drafted: found.drafted,
                accepted: found.accepted,
                prompt_ns: found.prompt_ns,
                round_ns: found.round_ns,
                pass_ns: found.pass_ns,
                dropped: text(found.dropped),
            })
        }
    }

    /// Bytes of the caches.
    pub fn bytes(&self) -> u64 {
        // SAFETY: the session is open.
        unsafe { sys::edgespec_session_bytes(self.raw()) }
    }

    /// Write the text and its keys and values to a file that only its owner can read.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        // SAFETY: the path ends with a zero.
        checked(unsafe { sys::edgespec_session_save(self.raw(), path.as_ptr()) })
    }

    /// Load a file of `save`, of the same bundle -> the number of tokens that need not be read again.
    pub fn restore(&mut self, path: impl AsRef<Path>) -> Result<i64> {
        let (path, mut tokens) = (c_path(path.as_ref())?, 0);
        // SAFETY: the path ends with a zero.
        checked(unsafe { sys::edgespec_session_restore(self.raw(), path.as_ptr(), &mut tokens) })?;
        Ok(tokens)
    }

    /// What can end this session's text from any thread.
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::downgrade(&self.handle))
    }

    fn raw(&self) -> *mut sys::Session {
        self.handle.raw.as_ptr()
    }

    fn next(&mut self) -> Result<Round> {
        let mut found = sys::Round::init();
        // SAFETY: the structure says its size; its arrays are the session's until its next call, and copied here.
        unsafe {
            checked(sys::edgespec_next(self.raw(), &mut found))?;
            let top = usize::try_from(found.top_count).unwrap_or(0).max(1);
            let number = found.count.saturating_mul(found.top_count);
            let likeliest: Vec<_> =
                copied(found.top_ids, number).into_iter().zip(copied(found.top_logprobs, number)).collect();
            let there = |of: &[(i64, f64)]| of.iter().copied().filter(|(token, _)| *token >= 0).collect();
            Ok(Round {
                tokens: copied(found.tokens, found.count),
                drafted: copied(found.drafted, found.drafted_count),
                rejected: copied(found.rejected, found.rejected_count),
                accepted: usize::try_from(found.accepted).unwrap_or(0),
                drafter: text(found.drafter),
                logprobs: copied(found.logprobs, found.count),
                top_logprobs: likeliest.chunks(top).map(there).collect(),
                text: String::from_utf8_lossy(&copied(found.text.cast(), found.text_size)).into_owned(),
                finish: match found.finish {
                    sys::STOPPED => Some(Finish::Stop),
                    sys::LENGTH => Some(Finish::Length),
                    sys::CONTEXT => Some(Finish::Context),
                    sys::STOP_TEXT => Some(Finish::StopText),
                    _ => None,
                },
            })
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Session").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

/// The rounds of a text.
#[derive(Debug)]
pub struct Text<'a> {
    session: &'a mut Session,
    ended: bool,
}

impl Iterator for Text<'_> {
    type Item = Result<Round>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let found = self.session.next();
        self.ended = !matches!(&found, Ok(round) if round.finish.is_none());
        Some(found)
    }
}

impl std::iter::FusedIterator for Text<'_> {}

/// Ends a session's text from any thread.
#[derive(Clone)]
pub struct Canceller(Weak<SessionHandle>);

impl Canceller {
    /// End the call that is running with [`Kind::Cancelled`], at the end of its pass, or else the next one. Does nothing
    /// to a session that is gone.
    pub fn cancel(&self) {
        if let Some(handle) = self.0.upgrade() {
            // SAFETY: the session is open while `handle` is there, and this call may come from any thread.
            unsafe { sys::edgespec_cancel(handle.raw.as_ptr()) }
        }
    }
}

impl fmt::Debug for Canceller {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("Canceller")
    }
}
