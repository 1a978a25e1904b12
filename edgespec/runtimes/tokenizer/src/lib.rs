//! Hugging Face's tokenizers and minijinja with a C interface, which `edgespec_tokenizer.h` describes.

mod chat;
mod codec;
mod control;
mod own;
mod python;

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_char, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::slice::from_raw_parts;

use codec::{Codec, Result, Stream};

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// A stream holds its tokenizer by address: it is closed first.
pub struct OpenStream {
    codec: *const Codec,
    stream: Stream,
    given: String,
}

/// Do something that may fail, or panic as the crate does for some damaged files -> None: the error is kept.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Option<T> {
    let said = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(found)) => return Some(found),
        Ok(Err(said)) => said,
        Err(panic) => panicked(&*panic),
    };
    let said = CString::new(said.replace('\0', " ")).unwrap_or_default();
    ERROR.with(|error| *error.borrow_mut() = said);
    None
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    said.unwrap_or("the tokenizer's library panicked").into()
}

fn status<T>(work: impl FnOnce() -> Result<T>) -> i32 {
    guarded(work).is_none().into()
}

/// The caller's array; null is an empty one.
unsafe fn given<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if data.is_null() || count == 0 {
        return &[];
    }
    from_raw_parts(data, count)
}

unsafe fn written<T: Copy>(found: &[T], to: *mut T, room: usize, count: *mut usize) -> Result<()> {
    let count = count.as_mut().ok_or("expected where to say how many there are")?;
    *count = found.len();
    if !to.is_null() {
        to.copy_from_nonoverlapping(found.as_ptr(), found.len().min(room));
    }
    Ok(())
}

unsafe fn ids(data: *const i64, count: usize) -> Result<Vec<u32>> {
    given(data, count).iter().map(|id| id_of(*id)).collect()
}

fn wide(ids: Vec<u32>) -> Vec<i64> {
    ids.into_iter().map(i64::from).collect()
}

fn id_of(id: i64) -> Result<u32> {
    u32::try_from(id).map_err(|_| format!("token {id}: expected 0 to 4294967295"))
}

unsafe fn codec_of<'a>(tokenizer: *const Codec) -> Result<&'a Codec> {
    tokenizer.as_ref().ok_or_else(|| "expected a tokenizer".into())
}

fn open(json: &[u8]) -> Result<*mut Codec> {
    boxed(|| Codec::open(json))
}

fn boxed(opened: impl FnOnce() -> Result<Codec>) -> Result<*mut Codec> {
    std::panic::set_hook(Box::new(|_| {})); // what a panic says becomes an error
    Ok(Box::into_raw(Box::new(opened().map_err(|said| format!("not a readable tokenizer: {said}"))?)))
}

unsafe fn path_of<'a>(path: *const c_char) -> Result<&'a str> {
    if path.is_null() {
        return Err("expected a path".into());
    }
    text_of(CStr::from_ptr(path).to_bytes())
}

fn text_of(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|error| format!("expected a text in UTF-8: {error}"))
}

#[no_mangle]
pub extern "C" fn edgespec_tokenizer_error() -> *const c_char {
    ERROR.with(|error| error.borrow().as_ptr())
}

/// Open a tokenizer and put it where the caller wants it.
unsafe fn placed(tokenizer: *mut *mut Codec, opened: impl FnOnce() -> Result<*mut Codec>) -> i32 {
    status(|| {
        let place = tokenizer.as_mut().ok_or("expected where to put the tokenizer")?;
        *place = opened()?;
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_open(file: *const c_char, tokenizer: *mut *mut Codec) -> i32 {
    placed(tokenizer, || {
        let name = path_of(file)?;
        open(&std::fs::read(name).map_err(|error| format!("{name}: {error}"))?)
    })
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_open_folder(folder: *const c_char, tokenizer: *mut *mut Codec) -> i32 {
    placed(tokenizer, || {
        let name = path_of(folder)?;
        boxed(|| Codec::open_folder(Path::new(name)))
    })
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_parse(json: *const u8, size: usize, tokenizer: *mut *mut Codec) -> i32 {
    placed(tokenizer, || open(given(json, size)))
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_close(tokenizer: *mut Codec) {
    if !tokenizer.is_null() {
        drop(Box::from_raw(tokenizer));
    }
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_size(tokenizer: *const Codec) -> usize {
    guarded(|| Ok(codec_of(tokenizer)?.size())).unwrap_or(0)
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_encode(
    tokenizer: *const Codec,
    text: *const u8,
    size: usize,
    special: i32,
    ids: *mut i64,
    room: usize,
    count: *mut usize,
) -> i32 {
    status(|| {
        let found = codec_of(tokenizer)?.encode(text_of(given(text, size))?, special != 0)?;
        written(&wide(found), ids, room, count)
    })
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_encode_chat(
    tokenizer: *const Codec,
    conversation: *const u8,
    size: usize,
    ids: *mut i64,
    room: usize,
    count: *mut usize,
) -> i32 {
    status(|| written(&wide(codec_of(tokenizer)?.encode_chat(given(conversation, size))?), ids, room, count))
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_tokenizer_decode(
    tokenizer: *const Codec,
    tokens: *const i64,
    count: usize,
    text: *mut u8,
    room: usize,
    size: *mut usize,
) -> i32 {
    status(|| written(codec_of(tokenizer)?.decode(&ids(tokens, count)?)?.as_bytes(), text, room, size))
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_stream_open(
    tokenizer: *const Codec,
    prompt: *const i64,
    count: usize,
    stream: *mut *mut OpenStream,
) -> i32 {
    status(|| {
        let place = stream.as_mut().ok_or("expected where to put the stream")?;
        let opened = Stream::open(codec_of(tokenizer)?, &ids(prompt, count)?)?;
        *place = Box::into_raw(Box::new(OpenStream { codec: tokenizer, stream: opened, given: String::new() }));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_stream_close(stream: *mut OpenStream) {
    if !stream.is_null() {
        drop(Box::from_raw(stream));
    }
}

/// Give what a stream says next, kept in it.
unsafe fn give(
    stream: *mut OpenStream,
    text: *mut *const u8,
    size: *mut usize,
    next: impl FnOnce(&mut Stream, &Codec) -> Result<String>,
) -> Result<()> {
    let stream = stream.as_mut().ok_or("expected a stream")?;
    let (text, size) = text.as_mut().zip(size.as_mut()).ok_or("expected where to put the text and its size")?;
    stream.given = next(&mut stream.stream, codec_of(stream.codec)?)?;
    (*text, *size) = (stream.given.as_ptr(), stream.given.len());
    Ok(())
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_stream_push(
    stream: *mut OpenStream,
    token: i64,
    text: *mut *const u8,
    size: *mut usize,
) -> i32 {
    status(|| give(stream, text, size, |stream, codec| stream.push(codec, id_of(token)?)))
}

#[no_mangle]
pub unsafe extern "C" fn edgespec_stream_finish(
    stream: *mut OpenStream,
    text: *mut *const u8,
    size: *mut usize,
) -> i32 {
    status(|| give(stream, text, size, Stream::finish))
}
