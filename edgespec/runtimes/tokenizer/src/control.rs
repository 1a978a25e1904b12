//! Special tokens in messages stay text, as `edgespec/runtimes/text/control_tokens.py` keeps them: a mark in each of
//! them before a template sees the conversation, which is taken out again when its text is encoded.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json};
use tokenizers::normalizer::Range;
use tokenizers::tokenizer::{NormalizedString, OffsetReferential, OffsetType, PreTokenizedString};
use tokenizers::{Model, Normalizer, NormalizerWrapper, PreTokenizer, Tokenizer};

use crate::chat::Conversation;
use crate::codec::Result;
use crate::own::OWN;

/// The control tokens of a tokenizer: special ones, and other added ones that a template writes or that look like it.
pub struct Control {
    everyone: Words,
    assistant: Words, // without what the model itself writes around thoughts and calls
    added: HashMap<u32, String>,
    normalizer: Option<NormalizerWrapper>, // where it can produce a control token
}

impl Control {
    pub fn of<'a>(tokenizer: &Tokenizer, templates: impl Iterator<Item = &'a String>) -> Self {
        let written: Vec<&String> = templates.collect();
        let known = tokenizer.get_added_tokens_decoder();
        let is_control = |content: &str, special: bool| {
            content.trim().chars().count() > 1
                && !content.chars().all(char::is_alphanumeric)
                && (special || bars(content) || written.iter().any(|text| text.contains(content)))
        };
        let words: HashSet<&str> = known
            .values()
            .filter(|token| is_control(&token.content, token.special))
            .map(|token| token.content.as_str())
            .collect();
        let normalized = known.values().any(|token| token.normalized && words.contains(token.content.as_str()));
        Self {
            everyone: Words::of(words.iter().copied()),
            assistant: Words::of(words.iter().copied().filter(|word| !OWN.contains(word))),
            normalizer: tokenizer.get_normalizer().filter(|_| normalized).cloned(),
            added: known.into_iter().map(|(id, token)| (id, token.content)).collect(),
        }
    }

    /// Put a mark into each control token in a conversation -> the mark, if there is such a token.
    pub fn hide(&self, of: &mut Conversation) -> Result<Option<char>> {
        let words = |message: &Map<String, Json>| match message.get("role") {
            Some(Json::String(role)) if role == "assistant" => &self.assistant,
            _ => &self.everyone,
        };
        let mut said = Vec::new();
        let mut found = false;
        for message in &of.messages {
            let begin = said.len();
            fields_of(message, &mut said);
            found |= said[begin..].iter().any(|text| self.has(words(message), text));
        }
        let begin = said.len();
        of.tools.iter().flatten().for_each(|tool| texts_of(tool, &mut said));
        found |= said[begin..].iter().any(|text| self.has(&self.everyone, text));
        if !found {
            return Ok(None);
        }
        let free = |mark: &char| {
            let escaped = format!("\\u{:04x}", *mark as u32);
            !said.iter().any(|text| text.contains(*mark) || text.contains(&escaped))
        };
        let mark = ('\u{e000}'..'\u{f900}').find(free);
        let mark = mark.ok_or("a conversation that has all characters for private use: expected some of them free")?;
        for message in &mut of.messages {
            let own = words(message);
            *message = std::mem::take(message)
                .into_iter()
                .map(|(key, value)| (key, mapped(value, &|text| self.marked(own, text, mark))))
                .collect();
        }
        if let Some(tools) = &mut of.tools {
            for tool in tools {
                *tool = mapped(std::mem::take(tool), &|text| self.marked(&self.everyone, text, mark));
            }
        }
        Ok(Some(mark))
    }

    fn has(&self, words: &Words, text: &str) -> bool {
        words.find(text).is_some() || self.appears(words, text)
    }

    /// Whether normalization produces a control token, as from ones in full-width characters.
    fn appears(&self, words: &Words, text: &str) -> bool {
        let Some(normalizer) = &self.normalizer else { return false };
        let mut made = NormalizedString::from(text);
        normalizer.normalize(&mut made).is_ok() && words.find(made.get()).is_some()
    }

    fn marked(&self, words: &Words, text: &str, mark: char) -> String {
        let (mut made, mut rest) = (String::new(), text);
        while let Some((begin, end)) = words.find(rest) {
            let first = begin + rest[begin..].chars().next().map_or(0, char::len_utf8);
            made.push_str(&rest[..first]);
            made.push(mark);
            made.push_str(&rest[first..end]);
            rest = &rest[end..];
        }
        made.push_str(rest);
        if self.appears(words, &made) {
            return text.chars().flat_map(|one| [one, mark]).collect();
        }
        made
    }

    /// Encode a rendered template: its own control tokens as such, those that hold the mark as text.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str, mark: Option<char>) -> Result<Vec<u32>> {
        let found = tokenizer.encode(text, false).map_err(|error| error.to_string())?;
        let tokens = found.get_ids();
        let Some(mark) = mark.filter(|mark| text.contains(*mark)) else { return Ok(tokens.to_vec()) };
        let (mut ids, mut begin, mut first) = (Vec::new(), 0, 0); // a byte, and a token
        let places = found.get_offsets().iter().copied().chain([(text.len(), text.len())]);
        for (at, (start, end)) in places.enumerate() {
            if tokens.get(at).is_some_and(|token| !self.is_added(*token, text.get(start..end))) {
                continue;
            }
            let between = text.get(begin..start).unwrap_or_default();
            if between.contains(mark) {
                ids.extend(as_text(tokenizer, &between.replace(mark, ""), begin == 0)?);
            } else {
                ids.extend(&tokens[first..at]);
            }
            ids.extend(tokens.get(at));
            (begin, first) = (end, at + 1);
        }
        Ok(ids)
    }

    fn is_added(&self, token: u32, text: Option<&str>) -> bool {
        self.added.get(&token).is_some_and(|content| text.is_some_and(|text| text.trim() == content.trim()))
    }
}

/// Encode a text between two added tokens; first: the sequence starts with it.
fn as_text(tokenizer: &Tokenizer, text: &str, first: bool) -> Result<Vec<u32>> {
    let before = if first { "" } else { "x" }; // tokenizers may treat what comes first in another way
    let said = |error: tokenizers::Error| error.to_string();
    let mut pieces = PreTokenizedString::from(format!("{before}{text}"));
    if !first {
        let cut = |piece: NormalizedString| {
            let size = piece.get().len();
            [0..1, 1..size].into_iter().filter_map(|range| piece.slice(Range::Normalized(range))).collect::<Vec<_>>()
        };
        pieces.split(|_, piece| Ok(cut(piece))).map_err(said)?;
    }
    if let Some(normalizer) = tokenizer.get_normalizer() {
        pieces.normalize(|piece| normalizer.normalize(piece)).map_err(said)?;
    }
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces).map_err(said)?;
    }
    let mut ids = Vec::new();
    for (piece, (_, end), _) in pieces.get_splits(OffsetReferential::Original, OffsetType::Byte) {
        if !piece.is_empty() && end > before.len() {
            ids.extend(tokenizer.get_model().tokenize(piece).map_err(said)?.into_iter().map(|token| token.id));
        }
    }
    Ok(ids)
}

fn bars(text: &str) -> bool {
    ["<|", "<\u{ff5c}"].iter().any(|begin| text.starts_with(begin))
        || ["|>", "\u{ff5c}>"].iter().any(|end| text.ends_with(end))
}

/// Words in a tree by their characters.
#[derive(Default)]
struct Words {
    next: HashMap<(usize, char), usize>,
    ends: HashSet<usize>,
    nodes: usize,
}

impl Words {
    fn of<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        let mut made = Self::default();
        for word in words {
            let mut node = 0;
            for one in word.chars() {
                let fresh = made.nodes + 1;
                node = *made.next.entry((node, one)).or_insert(fresh);
                made.nodes = made.nodes.max(node);
            }
            made.ends.insert(node);
        }
        made
    }

    /// Find the first word in a text, or the beginning of one at the text's end, which a next text may complete.
    fn find(&self, text: &str) -> Option<(usize, usize)> {
        text.char_indices().find_map(|(begin, _)| self.at(&text[begin..]).map(|size| (begin, begin + size)))
    }

    fn at(&self, text: &str) -> Option<usize> {
        let (mut node, mut found) = (0, None);
        for (at, one) in text.char_indices() {
            match self.next.get(&(node, one)) {
                Some(next) => node = *next,
                None => return found,
            }
            if self.ends.contains(&node) {
                found = Some(at + one.len_utf8());
            }
        }
        Some(text.len()).filter(|size| *size > 0)
    }
}

fn fields_of(fields: &Map<String, Json>, found: &mut Vec<String>) {
    for (key, value) in fields {
        found.push(key.clone());
        texts_of(value, found);
    }
}

/// All texts in plain data, keys of objects included.
fn texts_of(value: &Json, found: &mut Vec<String>) {
    match value {
        Json::String(text) => found.push(text.clone()),
        Json::Array(items) => items.iter().for_each(|item| texts_of(item, found)),
        Json::Object(fields) => fields_of(fields, found),
        _ => {}
    }
}

fn mapped(value: Json, change: &dyn Fn(&str) -> String) -> Json {
    match value {
        Json::String(text) => Json::String(change(&text)),
        Json::Array(items) => Json::Array(items.into_iter().map(|item| mapped(item, change)).collect()),
        Json::Object(fields) => {
            Json::Object(fields.into_iter().map(|(key, item)| (change(&key), mapped(item, change))).collect())
        }
        other => other,
    }
}
