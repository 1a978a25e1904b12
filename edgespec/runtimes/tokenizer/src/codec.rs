//! Tokens to text as `edgespec/runtimes/text` writes it: all tokens at once, or as they come.

use std::path::Path;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder, Tokenizer};

use crate::chat::{Conversation, Templates};
use crate::control::Control;

pub type Result<T> = std::result::Result<T, String>;

const REPLACEMENT: char = '\u{fffd}';
const CONTEXT: usize = 8; // tokens of the prompt that are enough context, if no character is cut
const HALF: usize = 3; // maximum bytes of an incomplete character, each perhaps written as U+FFFD

pub struct Codec {
    tokenizer: Tokenizer,
    chat: Option<(Templates, Control)>, // of a folder
}

impl Codec {
    pub fn open(json: &[u8]) -> Result<Self> {
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        Ok(Self { tokenizer, chat: None })
    }

    /// Open the tokenizer of a folder, and its chat templates.
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let file = folder.join("tokenizer.json");
        let mut made = Self::open(&std::fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?)?;
        let templates = Templates::of(folder)?;
        let control = Control::of(&made.tokenizer, templates.texts.values());
        made.chat = Some((templates, control));
        Ok(made)
    }

    /// The ids of a conversation in JSON, ready for the answer; special tokens in messages are text.
    pub fn encode_chat(&self, json: &[u8]) -> Result<Vec<u32>> {
        let (templates, control) = self.chat.as_ref().ok_or("opened without its folder, where chat templates are")?;
        let mut conversation = Conversation::read(json)?;
        let mark = control.hide(&mut conversation)?;
        let mut text = templates.render(conversation)?;
        if let Some(mark) = mark {
            text = text.replace(&format!("\\u{:04x}", mark as u32), &mark.to_string());
        }
        control.encode(&self.tokenizer, &text, mark)
    }

    pub fn size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, special).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids without special tokens; those that there are not give nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let added = self.tokenizer.get_added_vocabulary();
        let mut parts: Vec<String> = ids
            .iter()
            .filter_map(|id| self.tokenizer.id_to_token(*id))
            .filter(|token| !added.is_special_token(token))
            .collect();
        let Some(decoder) = self.tokenizer.get_decoder() else { return Ok(parts.join(" ")) };
        let steps = match decoder {
            DecoderWrapper::Sequence(all) => all.get_decoders(),
            one => std::slice::from_ref(one),
        };
        for step in steps {
            parts = match step {
                DecoderWrapper::ByteFallback(_) => characters(parts),
                other => other.decode_chain(parts).map_err(|error| error.to_string())?,
            };
        }
        Ok(parts.concat())
    }
}

/// Converts runs of byte tokens to characters. As in sentencepiece, characters next to a broken one stay; the library
/// writes U+FFFD for every byte of a run that has a broken one.
fn characters(parts: Vec<String>) -> Vec<String> {
    let (mut found, mut run) = (Vec::new(), Vec::new());
    for part in parts {
        if let Some(byte) = byte(&part) {
            run.push(byte);
        } else {
            flush(&mut run, &mut found);
            found.push(part);
        }
    }
    flush(&mut run, &mut found);
    found
}

fn byte(part: &str) -> Option<u8> {
    let digits = part.strip_prefix("<0x")?.strip_suffix('>')?;
    let whole = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| whole)
}

fn flush(run: &mut Vec<u8>, found: &mut Vec<String>) {
    let mut rest = &run[..];
    while !rest.is_empty() {
        let size = (1..=rest.len().min(4)).find(|size| std::str::from_utf8(&rest[..*size]).is_ok());
        found.push(size.map_or(REPLACEMENT.into(), |size| String::from_utf8_lossy(&rest[..size]).into()));
        rest = &rest[size.unwrap_or(1)..];
    }
    run.clear();
}

/// Text of a growing list of tokens, given out as soon as its characters are whole.
///
/// The window is the last tokens that gave text and those after them: enough for the space of the next word, and for
/// characters that are written by several tokens.
pub struct Stream {
    window: Vec<u32>,
    settled: usize, // tokens of the window whose text is out
    out: usize,     // bytes of the window's text that are out
}

impl Stream {
    pub fn open(codec: &Codec, prompt: &[u32]) -> Result<Self> {
        let (whole, mut count) = (codec.decode(prompt)?, CONTEXT);
        while count < prompt.len() {
            let part = codec.decode(&prompt[prompt.len() - count..])?;
            if !part.is_empty() && whole.ends_with(&part) {
                break;
            }
            count *= 2;
        }
        let window = prompt[prompt.len().saturating_sub(count)..].to_vec();
        Ok(Self { settled: window.len(), out: codec.decode(&window)?.len(), window })
    }

    pub fn push(&mut self, codec: &Codec, token: u32) -> Result<String> {
        self.window.push(token);
        let text = codec.decode(&self.window)?;
        // characters that may be the beginning of another
        let half = text.chars().rev().take_while(|one| *one == REPLACEMENT).count().min(HALF);
        let whole = text.len() - half * REPLACEMENT.len_utf8();
        let fresh = from(&text, self.out, whole);
        self.out = self.out.max(whole).min(text.len()); // a prompt may end within a character
        if half == 0 {
            // others stay: some decoders strip the spaces before the first word they see
            if !fresh.trim_matches(' ').is_empty() {
                self.window.drain(..self.settled);
                self.out = codec.decode(&self.window)?.len();
            }
            self.settled = self.window.len();
        }
        Ok(fresh)
    }

    pub fn finish(&mut self, codec: &Codec) -> Result<String> {
        let text = codec.decode(&self.window)?;
        let rest = from(&text, self.out, text.len());
        (self.out, self.settled) = (text.len(), self.window.len());
        Ok(rest)
    }
}

/// Returns the text between two places, the first one moved to the next beginning of a character.
fn from(text: &str, mut begin: usize, end: usize) -> String {
    while begin < end && !text.is_char_boundary(begin) {
        begin += 1;
    }
    text.get(begin..end).unwrap_or_default().into()
}
