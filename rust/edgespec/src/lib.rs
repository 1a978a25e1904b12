//! Native edgespec bundles: quantized language models with lossless speculative decoding.
//!
//! A [`Bundle`] is a folder that `edgespec export` made. A [`Session`] has one text and the memory of its models. It
//! reads and writes token ids; a tokenizer is the caller's, such as the crate `tokenizers`.
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
unsafe fn copied<T: Copy>(data: *const T, count: i32) -> Vec<T> {
    match usize::try_from(count) {
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

fn count<T>(values: &[T], name: &str) -> Result<i32> {
    i32::try_from(values.len()).map_err(|_| Error::refused(format!("{name}: too many")))
}

struct BundleHandle(NonNull<sys::Bundle>);

// SAFETY: a bundle is not changed after it was opened, and the library lets sessions of several threads share it.
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
        // SAFETY: a number.
        let version = unsafe { sys::edgespec_c_version() };
        if version < sys::C_VERSION {
            let wanted = sys::C_VERSION;
            return Err(Error::refused(format!("a library of interface {version}: expected {wanted} or later")));
        }
        let (path, mut made) = (c_path(folder.as_ref())?, null_mut());
        // SAFETY: the path ends with a zero, and `made` is written where the call succeeds.
        checked(unsafe { sys::edgespec_bundle_open(path.as_ptr(), i32::from(threads), &mut made) })?;
        Ok(Self(Arc::new(BundleHandle(NonNull::new(made).expect("a bundle")))))
    }

    pub fn facts(&self) -> Result<Facts> {
        let mut found = sys::BundleFacts {
            size: size_of::<sys::BundleFacts>() as u32,
            has_draft: 0,
            context: 0,
            vocab: 0,
            stops: null(),
            stop_count: 0,
        };
        // SAFETY: the structure says its size; what it points to is the bundle's.
        unsafe {
            checked(sys::edgespec_bundle_describe(self.0 .0.as_ptr(), &mut found))?;
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
            size: size_of::<sys::SessionOptions>() as u32,
            attention: match options.attention {
                None => 0,
                Some(Attention::F32) => 1,
                Some(Attention::F16) => 2,
                Some(Attention::Int8) => 3,
            },
            context: options.context.unwrap_or(0),
            ngram_store: store.as_ref().map_or(null(), |path| path.as_ptr()),
            max_bytes: options.max_bytes.unwrap_or(0),
        };
        let mut made = null_mut();
        // SAFETY: the bundle is open, `given` and its path stay during the call.
        checked(unsafe { sys::edgespec_session_open(self.0 .0.as_ptr(), &given, &mut made) })?;
        let handle = SessionHandle { raw: NonNull::new(made).expect("a session"), _bundle: self.clone() };
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
    /// `plain`, `ngram`, `speculative`, `self-spec`, or several with commas between.
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
    _bundle: Bundle,
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
        let method = settings.method.as_deref().map(CString::new).transpose();
        let method = method.map_err(|_| Error::refused("method: expected a name without zeros".into()))?;
        let (bias_tokens, biases): (Vec<i64>, Vec<f64>) = settings.logit_bias.iter().copied().unzip();
        let given = sys::Settings {
            size: size_of::<sys::Settings>() as u32,
            guesses: settings.guesses.map_or(0, i32::from),
            max_new_tokens: settings.max_new_tokens.unwrap_or(0),
            method: method.as_ref().map_or(null(), |words| words.as_ptr()),
            stops: settings.stops.as_ptr(),
            stop_count: count(&settings.stops, "stops")?,
            ignore_eos: settings.ignore_eos.into(),
            temperature: settings.temperature,
            top_k: settings.top_k,
            top_p: settings.top_p.unwrap_or(0.0),
            min_p: settings.min_p,
            repetition_penalty: settings.repetition_penalty.unwrap_or(0.0),
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
            progress: None,
            mask: None,
            user: null_mut(),
        };
        // SAFETY: all that `given` points to stays during the call, which copies what it keeps.
        checked(unsafe { sys::edgespec_begin(self.raw(), prompt.as_ptr(), prompt.len() as i64, &given) })?;
        Ok(Text { session: self, ended: false })
    }

    /// Sums of the text that was begun last.
    pub fn counts(&self) -> Result<Counts> {
        let mut found = sys::Counts {
            size: size_of::<sys::Counts>() as u32,
            reserved: 0,
            prompt_tokens: 0,
            reused_tokens: 0,
            rounds: 0,
            tokens: 0,
            drafted: 0,
            accepted: 0,
            prompt_ns: 0,
            round_ns: 0,
            pass_ns: 0,
            dropped: null(),
        };
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
        let mut found = sys::Round {
            size: size_of::<sys::Round>() as u32,
            finish: 0,
            tokens: null(),
            drafted: null(),
            rejected: null(),
            count: 0,
            drafted_count: 0,
            rejected_count: 0,
            accepted: 0,
            drafter: null(),
            logprobs: null(),
        };
        // SAFETY: the structure says its size; its arrays are the session's until its next call, and copied here.
        unsafe {
            checked(sys::edgespec_next(self.raw(), &mut found))?;
            Ok(Round {
                tokens: copied(found.tokens, found.count),
                drafted: copied(found.drafted, found.drafted_count),
                rejected: copied(found.rejected, found.rejected_count),
                accepted: usize::try_from(found.accepted).unwrap_or(0),
                drafter: text(found.drafter),
                logprobs: copied(found.logprobs, found.count),
                finish: match found.finish {
                    1 => Some(Finish::Stop),
                    2 => Some(Finish::Length),
                    3 => Some(Finish::Context),
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
