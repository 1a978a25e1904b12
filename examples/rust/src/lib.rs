//! Native edgespec bundles: models in memory-mapped files, caches of their texts, and passes of rows and trees.
//!
//! A safe layer over the C interface (`edgespec.h`), in which each function is described. Results are copied, so that
//! they outlive the next pass.

use std::ffi::{c_char, CStr, CString};
use std::fmt;
use std::path::Path;
use std::ptr::null;
use std::sync::Arc;

mod ffi {
    use std::ffi::c_char;

    pub enum Model {}
    pub enum Cache {}

    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default)]
    pub struct Facts {
        pub size: u32,
        pub layers: i32,
        pub vocab: i32,
        pub hidden: i32,
        pub input_width: i32,
        pub groups: i32,
        pub gates: i32,
        pub auxiliary: i32,
        pub stateful: i32,
        pub exact: i32,
        pub weight_bytes: u64,
    }

    #[repr(C)]
    pub struct Request {
        pub size: u32,
        pub rows: i32,
        pub tokens: *const i64,
        pub inputs: *const f32,
        pub parents: *const i32,
        pub slots: *const i32,
        pub gates: *const u8,
        pub logits: i32,
        pub top: i32,
        pub hidden: i32,
    }

    #[repr(C)]
    pub struct Result {
        pub size: u32,
        pub rows: i32,
        pub columns: i32,
        pub top: i32,
        pub hidden_columns: i32,
        pub logits: *const f32,
        pub ids: *const i64,
        pub values: *const f32,
        pub hidden: *const f32,
    }

    extern "C" {
        pub fn edgespec_error() -> *const c_char;
        pub fn edgespec_isa() -> *const c_char;
        pub fn edgespec_open(graph: *const c_char, threads: i32, model: *mut *mut Model) -> i32;
        pub fn edgespec_close(model: *mut Model);
        pub fn edgespec_describe(model: *const Model, facts: *mut Facts) -> i32;
        pub fn edgespec_cache_open(
            model: *mut Model,
            slots: i32,
            tokens: i64,
            attention: i32,
            cache: *mut *mut Cache,
        ) -> i32;
        pub fn edgespec_cache_close(cache: *mut Cache);
        pub fn edgespec_cache_length(cache: *const Cache, slot: i32) -> i64;
        pub fn edgespec_prefill(cache: *mut Cache, slot: i32, tokens: *const i64, count: i64) -> i32;
        pub fn edgespec_pass(cache: *mut Cache, request: *const Request, result: *mut Result) -> i32;
        pub fn edgespec_keep(cache: *mut Cache, slot: i32, rows: *const i32, count: i32) -> i32;
        pub fn edgespec_crop(cache: *mut Cache, slot: i32, length: i64, left: *mut i64) -> i32;
        pub fn edgespec_checkpoint(cache: *mut Cache, slot: i32) -> i32;
    }
}

pub use ffi::Facts;

/// Why the library refused something, in its words.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

fn text(words: *const c_char) -> String {
    // the library gives strings that stay, or that this thread's next call replaces
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}

fn checked(status: i32) -> Result<(), Error> {
    match status {
        0 => Ok(()),
        _ => Err(Error(text(unsafe { ffi::edgespec_error() }))),
    }
}

/// The instruction set of the kernels on this machine.
pub fn isa() -> String {
    text(unsafe { ffi::edgespec_isa() })
}

struct Handle(*mut ffi::Model);

// passes of one model wait for each other inside the library
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        unsafe { ffi::edgespec_close(self.0) }
    }
}

/// An open model; clones share it.
#[derive(Clone)]
pub struct Model(Arc<Handle>);

impl Model {
    /// Open a graph file, `model.native.onnx` of a bundle. Threads: 0 = as many as there are processors.
    pub fn open(graph: &Path, threads: i32) -> Result<Self, Error> {
        let path = graph.to_str().and_then(|path| CString::new(path).ok());
        let path = path.ok_or_else(|| Error(format!("{}: not a path in UTF-8", graph.display())))?;
        let mut model = std::ptr::null_mut();
        checked(unsafe { ffi::edgespec_open(path.as_ptr(), threads, &mut model) })?;
        Ok(Self(Arc::new(Handle(model))))
    }

    pub fn facts(&self) -> Result<Facts, Error> {
        let mut facts = Facts { size: size_of::<Facts>() as u32, ..Facts::default() };
        checked(unsafe { ffi::edgespec_describe(self.0 .0, &mut facts) })?;
        Ok(facts)
    }

    /// Make empty slots of `tokens` tokens each, whose keys and values are exact.
    pub fn cache(&self, slots: i32, tokens: i64) -> Result<Cache, Error> {
        let mut cache = std::ptr::null_mut();
        checked(unsafe { ffi::edgespec_cache_open(self.0 .0, slots, tokens, 0, &mut cache) })?;
        Ok(Cache { raw: cache, _model: self.clone() })
    }
}

/// Rows of a pass.
#[derive(Clone, Copy, Default)]
pub struct Rows<'a> {
    pub tokens: &'a [i64],
    /// The earlier row that each continues, -1: its slot's text. None: each the one before it.
    pub parents: Option<&'a [i32]>,
    /// Ascending. None: all of slot 0.
    pub slots: Option<&'a [i32]>,
    /// Return only this many best tokens of each row. 0: all logits.
    pub top: i32,
    pub hidden: bool,
}

/// The result of a pass: `rows` of `columns` logits, or of `top` tokens with their logits, the best first.
#[derive(Default)]
pub struct Pass {
    pub rows: usize,
    pub columns: usize,
    pub logits: Vec<f32>,
    pub ids: Vec<i64>,
    pub values: Vec<f32>,
    pub hidden: Vec<f32>,
}

/// Keys, values and states of some texts.
pub struct Cache {
    raw: *mut ffi::Cache,
    _model: Model, // is closed after its caches
}

unsafe impl Send for Cache {}

impl Drop for Cache {
    fn drop(&mut self) {
        unsafe { ffi::edgespec_cache_close(self.raw) }
    }
}

impl Cache {
    /// Tokens of a slot; None: there is no such slot.
    pub fn length(&self, slot: i32) -> Option<i64> {
        Some(unsafe { ffi::edgespec_cache_length(self.raw, slot) }).filter(|length| *length >= 0)
    }

    /// Read a text to the end of a slot's.
    pub fn prefill(&mut self, slot: i32, tokens: &[i64]) -> Result<(), Error> {
        checked(unsafe { ffi::edgespec_prefill(self.raw, slot, tokens.as_ptr(), tokens.len() as i64) })
    }

    /// Run rows after the texts; `keep` commits some of them.
    pub fn pass(&mut self, rows: Rows) -> Result<Pass, Error> {
        let count = rows.tokens.len();
        let lengths = [rows.parents.map(<[i32]>::len), rows.slots.map(<[i32]>::len)];
        if lengths.into_iter().flatten().any(|length| length != count) {
            return Err(Error(format!("expected parents and slots of {count} rows")));
        }
        let request = ffi::Request {
            size: size_of::<ffi::Request>() as u32,
            rows: i32::try_from(count).unwrap_or(i32::MAX),
            tokens: rows.tokens.as_ptr(),
            inputs: null(),
            parents: rows.parents.map_or(null(), <[i32]>::as_ptr),
            slots: rows.slots.map_or(null(), <[i32]>::as_ptr),
            gates: null(),
            logits: 1,
            top: rows.top,
            hidden: rows.hidden.into(),
        };
        let mut found: ffi::Result = unsafe { std::mem::zeroed() };
        found.size = size_of::<ffi::Result>() as u32;
        checked(unsafe { ffi::edgespec_pass(self.raw, &request, &mut found) })?;
        let (given, columns, top) = (found.rows as usize, found.columns as usize, found.top as usize);
        let hidden = found.hidden_columns as usize;
        Ok(Pass {
            rows: given,
            columns: if top > 0 { top } else { columns },
            logits: copied(found.logits, given * columns),
            ids: copied(found.ids, given * top),
            values: copied(found.values, given * top),
            hidden: copied(found.hidden, count * hidden),
        })
    }

    /// Commit rows of the last pass, a path from the text on, by their numbers in it.
    pub fn keep(&mut self, slot: i32, rows: &[i32]) -> Result<(), Error> {
        checked(unsafe { ffi::edgespec_keep(self.raw, slot, rows.as_ptr(), rows.len() as i32) })
    }

    /// Forget tokens after the first `length`; returns how many are left (fewer where states cannot be cut back).
    pub fn crop(&mut self, slot: i32, length: i64) -> Result<i64, Error> {
        let mut left = 0;
        checked(unsafe { ffi::edgespec_crop(self.raw, slot, length, &mut left) })?;
        Ok(left)
    }

    /// Keep the states of a text as it is, so that it can be cropped to here.
    pub fn checkpoint(&mut self, slot: i32) -> Result<(), Error> {
        checked(unsafe { ffi::edgespec_checkpoint(self.raw, slot) })
    }
}

fn copied<T: Copy>(from: *const T, count: usize) -> Vec<T> {
    if from.is_null() || count == 0 {
        return Vec::new();
    }
    unsafe { std::slice::from_raw_parts(from, count) }.to_vec()
}

/// Greedy decoding with n-gram guesses: the tokens of plain greedy decoding, in fewer passes.
///
/// Returns the tokens written, without what came after one of `ends`, and the number of passes.
pub fn greedy(model: &Model, prompt: &[i64], new: usize, ends: &[i64]) -> Result<(Vec<i64>, usize), Error> {
    const GUESSES: usize = 7;
    let (last, before) = prompt.split_last().ok_or_else(|| Error("expected a prompt of at least one token".into()))?;
    let mut cache = model.cache(1, (prompt.len() + new + GUESSES + 1) as i64)?;
    cache.prefill(0, before)?;
    let (mut tokens, mut passes, mut pending) = (prompt.to_vec(), 0, *last);
    while tokens.len() < prompt.len() + new {
        let most = GUESSES.min(prompt.len() + new - tokens.len() - 1);
        let mut rows = vec![pending];
        rows.extend_from_slice(&followed(&tokens, most));
        let pass = cache.pass(Rows { tokens: &rows, top: 1, ..Rows::default() })?;
        passes += 1;
        let right = (0..rows.len() - 1).take_while(|row| pass.ids[*row] == rows[row + 1]).count();
        cache.keep(0, &(0..=right as i32).collect::<Vec<_>>())?;
        for said in &pass.ids[..=right] {
            tokens.push(*said);
            if ends.contains(said) {
                return Ok((tokens.split_off(prompt.len()), passes));
            }
        }
        pending = pass.ids[right];
    }
    Ok((tokens.split_off(prompt.len()), passes))
}

/// The continuation of the latest earlier place that matches the text's end, the longest match first.
fn followed(tokens: &[i64], most: usize) -> Vec<i64> {
    for length in (1..=4.min(tokens.len())).rev() {
        let ending = &tokens[tokens.len() - length..];
        let earlier = &tokens[..tokens.len() - 1];
        if let Some(at) = earlier.windows(length).rposition(|window| window == ending) {
            return tokens[at + length..].iter().take(most).copied().collect();
        }
    }
    Vec::new()
}
