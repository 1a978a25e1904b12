//! Sessions of `edgespec.h`, as they are; that header describes them. The crate `edgespec` is safe.
#![no_std]

use core::ffi::{c_char, c_double, c_int, c_void};
use core::mem::size_of;

/// Version of the interface that these declarations follow (`EDGESPEC_C_VERSION`).
pub const C_VERSION: u32 = 6;

pub const OK: c_int = 0;
pub const REFUSED: c_int = 1;
pub const NO_MEMORY: c_int = 2;
pub const CANCELLED: c_int = 3;
pub const FULL: c_int = 4;
pub const NO_FILE: c_int = 5;
pub const BROKEN: c_int = 6;
pub const HOST_FAILED: c_int = 7;

pub const ATTENTION_F32: i32 = 1;
pub const ATTENTION_F16: i32 = 2;
pub const ATTENTION_INT8: i32 = 3;

pub const GOES_ON: i32 = 0;
pub const STOPPED: i32 = 1;
pub const LENGTH: i32 = 2;
pub const CONTEXT: i32 = 3;
pub const STOP_TEXT: i32 = 4;

/// Structures as `EDGESPEC_INIT` makes them.
macro_rules! sized {
    ($($name:ident)*) => {$(
        impl $name {
            /// Sets the size, and all other fields to zero.
            pub const fn init() -> Self {
                // SAFETY: of numbers, pointers and optional functions, which may all be zero.
                let mut made: Self = unsafe { core::mem::zeroed() };
                made.size = size_of::<Self>() as u32;
                made
            }
        }
    )*};
}

sized!(BundleFacts Codec HostPass Host SessionOptions Settings Round Counts);

/// An opened bundle.
#[repr(C)]
pub struct Bundle {
    _opaque: [u8; 0],
}

/// A text over a bundle.
#[repr(C)]
pub struct Session {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BundleFacts {
    pub size: u32,
    pub has_draft: i32,
    pub context: i64,
    pub vocab: i64,
    pub stops: *const i64,
    pub stop_count: i32,
}

pub type Encode = unsafe extern "C" fn(
    user: *mut c_void,
    text: *const c_char,
    size: usize,
    special: i32,
    ids: *mut i64,
    room: usize,
    count: *mut usize,
) -> c_int;
pub type Decode = unsafe extern "C" fn(
    user: *mut c_void,
    ids: *const i64,
    count: usize,
    text: *mut c_char,
    room: usize,
    size: *mut usize,
) -> c_int;
pub type EncodeChat = unsafe extern "C" fn(
    user: *mut c_void,
    conversation: *const c_char,
    size: usize,
    ids: *mut i64,
    room: usize,
    count: *mut usize,
) -> c_int;
pub type CodecError = unsafe extern "C" fn() -> *const c_char;
pub type Close = unsafe extern "C" fn(user: *mut c_void);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Codec {
    pub size: u32,
    pub reserved: i32,
    pub user: *mut c_void,
    pub encode: Option<Encode>,
    pub decode: Option<Decode>,
    pub encode_chat: Option<EncodeChat>,
    pub error: Option<CodecError>,
    pub close: Option<Close>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub role: *const c_char,
    pub content: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HostPass {
    pub size: u32,
    pub rows: i32,
    pub tokens: *const i64,
    pub positions: *const i64,
    pub parents: *const i32,
    pub kept: i64,
    pub moves: *const i64,
    pub move_count: i32,
    pub scored: i32,
    pub columns: i64,
    pub logits: *mut f32,
}

pub type RunPass = unsafe extern "C" fn(user: *mut c_void, pass: *const HostPass) -> c_int;
pub type HostError = unsafe extern "C" fn(user: *mut c_void) -> *const c_char;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Host {
    pub size: u32,
    pub trees: i32,
    pub user: *mut c_void,
    pub run: Option<RunPass>,
    pub error: Option<HostError>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    pub size: u32,
    pub attention: i32,
    pub context: i64,
    pub ngram_store: *const c_char,
    pub max_bytes: u64,
    pub target: *const Host,
    pub draft: *const Host,
}

pub type Progress = unsafe extern "C" fn(user: *mut c_void, done: i64, total: i64) -> c_int;
pub type Mask = unsafe extern "C" fn(
    user: *mut c_void,
    text: *const i64,
    count: i64,
    path: *const i64,
    path_count: i32,
    logits: *const f32,
    columns: i64,
    allowed: *mut u8,
) -> c_int;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub size: u32,
    pub guesses: i32,
    pub max_new_tokens: i64,
    pub method: *const c_char,
    pub stops: *const i64,
    pub stop_count: i32,
    pub ignore_eos: i32,
    pub temperature: c_double,
    pub top_k: i64,
    pub top_p: c_double,
    pub min_p: c_double,
    pub repetition_penalty: c_double,
    pub presence_penalty: c_double,
    pub frequency_penalty: c_double,
    pub bias_tokens: *const i64,
    pub biases: *const c_double,
    pub bias_count: i32,
    pub seeded: i32,
    pub seed: i64,
    pub coupled: i32,
    pub block: i32,
    pub branch: *const i32,
    pub branch_count: i32,
    pub logprobs: i32,
    pub fixed: i32,
    pub prediction: *const i64,
    pub prediction_count: i64,
    pub progress: Option<Progress>,
    pub mask: Option<Mask>,
    pub user: *mut c_void,
    pub stop_texts: *const *const c_char,
    pub stop_text_count: i32,
    pub nodes: i32,
    pub cycles: i32,
    pub top_logprobs: i32,
    pub adapter: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub size: u32,
    pub finish: i32,
    pub tokens: *const i64,
    pub drafted: *const i64,
    pub rejected: *const i64,
    pub count: i32,
    pub drafted_count: i32,
    pub rejected_count: i32,
    pub accepted: i32,
    pub drafter: *const c_char,
    pub logprobs: *const c_double,
    pub text: *const c_char,
    pub text_size: usize,
    pub top_ids: *const i64,
    pub top_logprobs: *const c_double,
    pub top_count: i32,
    pub reserved: i32,
}

pub type OnRound = unsafe extern "C" fn(user: *mut c_void, round: *const Round) -> c_int;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    pub size: u32,
    pub reserved: i32,
    pub prompt_tokens: i64,
    pub reused_tokens: i64,
    pub rounds: i64,
    pub tokens: i64,
    pub drafted: i64,
    pub accepted: i64,
    pub prompt_ns: u64,
    pub round_ns: u64,
    pub pass_ns: u64,
    pub dropped: *const c_char,
}

extern "C" {
    pub fn edgespec_c_version() -> u32;
    pub fn edgespec_version() -> *const c_char;
    pub fn edgespec_isa() -> *const c_char;
    pub fn edgespec_error() -> *const c_char;
    pub fn edgespec_bundle_open(folder: *const c_char, threads: i32, bundle: *mut *mut Bundle) -> c_int;
    pub fn edgespec_bundle_open_streamed(
        folder: *const c_char,
        threads: i32,
        cache: u64,
        bundle: *mut *mut Bundle,
    ) -> c_int;
    pub fn edgespec_bundle_open_hosted(folder: *const c_char, bundle: *mut *mut Bundle) -> c_int;
    pub fn edgespec_bundle_close(bundle: *mut Bundle);
    pub fn edgespec_bundle_limit(bundle: *mut Bundle, threads: i32) -> c_int;
    pub fn edgespec_bundle_add_adapter(bundle: *mut Bundle, folder: *const c_char, adapter: *mut i32) -> c_int;
    pub fn edgespec_bundle_describe(bundle: *const Bundle, facts: *mut BundleFacts) -> c_int;
    pub fn edgespec_bundle_set_codec(bundle: *mut Bundle, codec: *const Codec) -> c_int;
    pub fn edgespec_bundle_load_codec(bundle: *mut Bundle, path: *const c_char) -> c_int;
    pub fn edgespec_encode(
        bundle: *const Bundle,
        text: *const c_char,
        size: usize,
        special: i32,
        ids: *mut i64,
        room: usize,
        count: *mut usize,
    ) -> c_int;
    pub fn edgespec_decode(
        bundle: *const Bundle,
        ids: *const i64,
        count: usize,
        text: *mut c_char,
        room: usize,
        size: *mut usize,
    ) -> c_int;
    pub fn edgespec_encode_chat(
        bundle: *const Bundle,
        messages: *const Message,
        message_count: i32,
        more: *const c_char,
        ids: *mut i64,
        room: usize,
        count: *mut usize,
    ) -> c_int;
    pub fn edgespec_session_open(
        bundle: *mut Bundle,
        options: *const SessionOptions,
        session: *mut *mut Session,
    ) -> c_int;
    pub fn edgespec_session_close(session: *mut Session);
    pub fn edgespec_session_bytes(session: *const Session) -> u64;
    pub fn edgespec_session_save(session: *mut Session, path: *const c_char) -> c_int;
    pub fn edgespec_session_restore(session: *mut Session, path: *const c_char, tokens: *mut i64) -> c_int;
    pub fn edgespec_begin(session: *mut Session, prompt: *const i64, count: i64, settings: *const Settings) -> c_int;
    pub fn edgespec_next(session: *mut Session, round: *mut Round) -> c_int;
    pub fn edgespec_generate(
        session: *mut Session,
        prompt: *const i64,
        count: i64,
        settings: *const Settings,
        on_round: Option<OnRound>,
        user: *mut c_void,
    ) -> c_int;
    pub fn edgespec_chat(
        session: *mut Session,
        messages: *const Message,
        message_count: i32,
        more: *const c_char,
        settings: *const Settings,
        on_round: Option<OnRound>,
        user: *mut c_void,
    ) -> c_int;
    pub fn edgespec_cancel(session: *mut Session);
    pub fn edgespec_session_counts(session: *const Session, counts: *mut Counts) -> c_int;
}
