//! The same for Java and Kotlin: dev.edgespec.runtimes.NativeTokenizer (android_demo). Texts are bytes in UTF-8.

use std::ffi::CStr;
use std::ptr::null_mut;

use jni_sys::{jbyteArray, jclass, jint, jintArray, jlong, JNIEnv};

use crate::{codec_of, edgespec_tokenizer_close, edgespec_tokenizer_error, guarded, open, text_of, Codec, Result};

macro_rules! call {
    ($env:expr, $name:ident $(, $argument:expr)*) => {
        ((**$env).$name.ok_or(concat!("JNI has no ", stringify!($name)))?)($env $(, $argument)*)
    };
}

unsafe fn bytes(env: *mut JNIEnv, array: jbyteArray) -> Result<Vec<u8>> {
    let mut found = vec![0u8; call!(env, GetArrayLength, array) as usize];
    call!(env, GetByteArrayRegion, array, 0, found.len() as jint, found.as_mut_ptr().cast());
    Ok(found)
}

unsafe fn byte_array(env: *mut JNIEnv, bytes: &[u8]) -> Result<jbyteArray> {
    let made = call!(env, NewByteArray, bytes.len() as jint);
    if !made.is_null() {
        call!(env, SetByteArrayRegion, made, 0, bytes.len() as jint, bytes.as_ptr().cast());
    }
    Ok(made)
}

#[no_mangle]
pub unsafe extern "system" fn Java_dev_edgespec_runtimes_NativeTokenizer_open(
    env: *mut JNIEnv,
    _: jclass,
    json: jbyteArray,
) -> jlong {
    guarded(|| open(&bytes(env, json)?)).unwrap_or(null_mut()) as jlong
}

#[no_mangle]
pub unsafe extern "system" fn Java_dev_edgespec_runtimes_NativeTokenizer_close(
    _: *mut JNIEnv,
    _: jclass,
    handle: jlong,
) {
    edgespec_tokenizer_close(handle as *mut Codec);
}

/// The ids of a text; null: `error` says why.
#[no_mangle]
pub unsafe extern "system" fn Java_dev_edgespec_runtimes_NativeTokenizer_encode(
    env: *mut JNIEnv,
    _: jclass,
    handle: jlong,
    text: jbyteArray,
    special: jint,
) -> jintArray {
    let work = || {
        let found = codec_of(handle as *const Codec)?.encode(text_of(&bytes(env, text)?)?, special != 0)?;
        let made = call!(env, NewIntArray, found.len() as jint);
        if !made.is_null() {
            call!(env, SetIntArrayRegion, made, 0, found.len() as jint, found.as_ptr().cast());
        }
        Ok(made)
    };
    guarded(work).unwrap_or(null_mut())
}

/// The text of ids; null: `error` says why.
#[no_mangle]
pub unsafe extern "system" fn Java_dev_edgespec_runtimes_NativeTokenizer_decode(
    env: *mut JNIEnv,
    _: jclass,
    handle: jlong,
    ids: jintArray,
) -> jbyteArray {
    let work = || {
        let mut tokens = vec![0u32; call!(env, GetArrayLength, ids) as usize];
        call!(env, GetIntArrayRegion, ids, 0, tokens.len() as jint, tokens.as_mut_ptr().cast());
        byte_array(env, codec_of(handle as *const Codec)?.decode(&tokens)?.as_bytes())
    };
    guarded(work).unwrap_or(null_mut())
}

/// Why the last call of this thread failed.
#[no_mangle]
pub unsafe extern "system" fn Java_dev_edgespec_runtimes_NativeTokenizer_error(
    env: *mut JNIEnv,
    _: jclass,
) -> jbyteArray {
    let said = CStr::from_ptr(edgespec_tokenizer_error());
    guarded(|| byte_array(env, said.to_bytes())).unwrap_or(null_mut())
}
