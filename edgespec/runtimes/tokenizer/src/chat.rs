//! Conversations as text by the model's own template, as `edgespec/runtimes/text/chat.py` writes them.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::Path;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use regex::Regex;
use serde_json::{Map, Value as Json};

use crate::codec::Result;
use crate::python::{write_json, write_value};

const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
const FUEL: u64 = 20_000_000; // instructions of a template, which comes with a model and may loop
const MOST_BYTES: u64 = 32 << 20; // of a file
const TAG: &str = "EDGESPEC_THE_ANSWER_GOES_ON_HERE "; // after the text of a message that is continued

/// A conversation: its messages, the tools that may be called, and further variables of the template.
pub struct Conversation {
    pub messages: Vec<Map<String, Json>>,
    pub tools: Option<Vec<Json>>,
    options: Map<String, Json>,
    generation_prompt: bool,
    continue_final: bool, // the text ends within the last message
}

impl Conversation {
    /// Read a list of messages, or an object with messages, tools, options, generation_prompt and continue_final.
    pub fn read(json: &[u8]) -> Result<Self> {
        let given: Json = serde_json::from_slice(json).map_err(|error| format!("a conversation: {error}"))?;
        let mut fields = match given {
            Json::Object(fields) => fields,
            list => Map::from_iter([("messages".into(), list)]),
        };
        let Some(Json::Array(messages)) = fields.remove("messages") else { Err("expected a list of messages")? };
        let messages: Vec<_> = messages.into_iter().map(object).collect::<Result<_>>()?;
        if messages.is_empty() {
            Err("expected a conversation of at least one message")?;
        }
        let tools = match fields.remove("tools") {
            None | Some(Json::Null) => None,
            Some(Json::Array(tools)) if tools.iter().all(Json::is_object) => Some(tools),
            _ => Err("expected tools as a list of JSON schemas")?,
        };
        let options = fields.remove("options").map_or(Ok(Map::new()), object)?;
        if let Some(taken) = RESERVED.iter().find(|name| options.contains_key(**name)) {
            Err(format!("{taken} is no option of a template"))?;
        }
        let generation_prompt = flag(&mut fields, "generation_prompt", true)?;
        let continue_final = flag(&mut fields, "continue_final", false)?;
        match fields.keys().next() {
            Some(name) => {
                Err(format!("{name}: expected messages, tools, options, generation_prompt and continue_final"))
            }
            None => Ok(Self { messages, tools, options, generation_prompt, continue_final }),
        }
    }
}

fn flag(fields: &mut Map<String, Json>, name: &str, default: bool) -> Result<bool> {
    match fields.remove(name) {
        None => Ok(default),
        Some(Json::Bool(wanted)) => Ok(wanted),
        _ => Err(format!("expected {name} as true or false")),
    }
}

fn object(value: Json) -> Result<Map<String, Json>> {
    match value {
        Json::Object(fields) => Ok(fields),
        _ => Err("expected a JSON object".into()),
    }
}

/// The templates of a model, and the special tokens that they write by name.
#[derive(Default)]
pub struct Templates {
    pub texts: BTreeMap<String, String>,
    names: Map<String, Json>,
}

impl Templates {
    /// Find them in a folder: files before what tokenizer_config.json has.
    pub fn of(folder: &Path) -> Result<Self> {
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let other = read_object(&folder.join("special_tokens_map.json"))?;
        let mut found = Self::default();
        for key in NAMED {
            let value = if config.contains_key(key) { config.get(key) } else { other.get(key) };
            let value = value.and_then(|value| value.get("content").or(Some(value))).and_then(Json::as_str);
            if let Some(name) = value.filter(|name| !name.is_empty()) {
                found.names.insert(key.into(), name.into());
            }
        }
        found.texts = files(folder)?;
        if found.texts.is_empty() {
            found.texts = configured(config.get("chat_template"));
        }
        found.texts.retain(|_, text| !text.is_empty());
        Ok(found)
    }

    /// Render a conversation.
    pub fn render(&self, of: Conversation) -> Result<String> {
        let named = of.tools.as_ref().and_then(|_| self.texts.get("tool_use"));
        let template = named.or_else(|| self.texts.get("default")).ok_or("this model has no chat template")?;
        let mut values = self.names.clone();
        values.extend(of.options);
        let mut messages: Vec<_> = of.messages.into_iter().map(prepared).collect();
        if of.continue_final {
            let text = messages.last_mut().and_then(text_of);
            text.ok_or("the last message has no text that an answer could continue")?.push_str(TAG);
        }
        let messages: Vec<_> = messages.into_iter().map(Json::Object).collect();
        values.insert("messages".into(), messages.into());
        values.insert("tools".into(), of.tools.map_or(Json::Null, Json::Array));
        values.insert("documents".into(), Json::Null);
        values.insert("add_generation_prompt".into(), (of.generation_prompt && !of.continue_final).into());
        let environment = environment();
        let compiled = environment.template_from_str(&with_scopes(template)).map(|one| one.render(&values));
        let text = compiled.and_then(|text| text).map_err(|error| {
            let what = error.detail().map_or_else(|| error.to_string(), String::from);
            format!("the model's chat template refuses these messages: {what}")
        })?;
        if of.continue_final {
            cut(&text)
        } else {
            Ok(text)
        }
    }
}

/// The text of a message that can be continued, or of the last of its blocks that has any.
fn text_of(message: &mut Map<String, Json>) -> Option<&mut String> {
    match message.get_mut("content")? {
        Json::String(text) => Some(text),
        Json::Array(blocks) => blocks.iter_mut().rev().find_map(|block| match block.get_mut("text") {
            Some(Json::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    }
}

/// Cut a text before the tag; a template that trims the message has also trimmed the tag's space.
fn cut(text: &str) -> Result<String> {
    let at = text.rfind(TAG.trim_end());
    let at = at.ok_or("the model's chat template does not write the last message, so it cannot be continued")?;
    Ok(if text[at..].starts_with(TAG) { &text[..at] } else { text[..at].trim_end() }.into())
}

fn files(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    if let Ok(listed) = std::fs::read_dir(folder.join("additional_chat_templates")) {
        for path in listed.flatten().map(|entry| entry.path()).filter(|path| path.extension() == Some("jinja".as_ref()))
        {
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_string();
            found.insert(name, read(&path)?);
        }
    }
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        found.insert("default".into(), read(&path)?);
    }
    Ok(found)
}

fn configured(template: Option<&Json>) -> BTreeMap<String, String> {
    match template {
        Some(Json::String(text)) => BTreeMap::from([("default".into(), text.clone())]),
        Some(Json::Array(all)) => all
            .iter()
            .filter_map(|one| Some((one.get("name")?.as_str()?.into(), one.get("template")?.as_str()?.into())))
            .collect(),
        _ => BTreeMap::new(),
    }
}

fn read(path: &Path) -> Result<String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let facts = std::fs::metadata(path).map_err(failed)?;
    if !facts.is_file() || facts.len() > MOST_BYTES {
        Err(format!("{}: expected a file of at most 32 MiB", path.display()))?;
    }
    Ok(read_to_string(path).map_err(failed)?.replace("\r\n", "\n").replace('\r', "\n"))
}

fn read_object(path: &Path) -> Result<Map<String, Json>> {
    if !path.is_file() {
        return Ok(Map::new());
    }
    let found = serde_json::from_str(&read(path)?).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(if let Json::Object(fields) = found { fields } else { Map::new() })
}

/// A message without keys that have no value, and with thoughts under the names that templates know.
fn prepared(message: Map<String, Json>) -> Map<String, Json> {
    let mut made: Map<String, Json> = message.into_iter().filter(|(_, value)| !value.is_null()).collect();
    if let Some(thoughts) = REASONING.iter().find_map(|key| made.get(*key).cloned()) {
        made.entry("thinking").or_insert_with(|| thoughts.clone());
        made.insert("reasoning_content".into(), thoughts);
    }
    made
}

/// Write `generation` blocks, which mark a model's output for training, as the scopes that they are.
fn with_scopes(template: &str) -> String {
    let tag = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a pattern");
    let scope = |found: &regex::Captures| {
        let name = if found.get(2).is_some() { "endwith" } else { "with" };
        format!("{{%{} {name} {}%}}", &found[1], &found[3])
    };
    tag.replace_all(template, scope).into_owned()
}

fn environment() -> Environment<'static> {
    let mut made = Environment::new();
    made.set_trim_blocks(true);
    made.set_lstrip_blocks(true);
    made.set_fuel(Some(FUEL));
    made.set_auto_escape_callback(|_| AutoEscape::None);
    made.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    made.set_formatter(|out, _, value| {
        out.write_str(&write_value(value)).map_err(|_| Error::new(ErrorKind::WriteFailure, "out of memory"))
    });
    made.add_filter("tojson", as_json);
    made.add_filter("string", |value: &Value| write_value(value));
    made.add_filter("trim", |value: &Value, these: Option<String>| match these {
        Some(these) => write_value(value).trim_matches(|one| these.contains(one)).to_string(),
        None => write_value(value).trim().to_string(),
    });
    let iterable = |kind| {
        use ValueKind::*;
        matches!(kind, String | Seq | Map | Iterable | Undefined) // as in Jinja2
    };
    made.add_test("iterable", move |value: &Value| iterable(value.kind()));
    made.add_test("sequence", move |value: &Value| iterable(value.kind()));
    made.add_function("raise_exception", |what: String| -> std::result::Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, what))
    });
    made.add_function("strftime_now", |form: String| -> std::result::Result<String, Error> {
        use std::fmt::Write;
        let mut text = String::new();
        let written = write!(text, "{}", chrono::Local::now().format(&form));
        written.map(|()| text).map_err(|_| Error::new(ErrorKind::InvalidOperation, "strftime_now: no such format"))
    });
    made
}

/// Write a value as Python's `json.dumps(value, ensure_ascii=False)` does.
fn as_json(_: &State, value: &Value, indent: Option<Value>, named: Kwargs) -> std::result::Result<Value, Error> {
    let indent = match indent {
        Some(given) => Some(given),
        None => named.get::<Option<Value>>("indent")?,
    };
    let step = match indent.filter(|given| !given.is_none()) {
        None => None,
        Some(given) => Some(match given.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(given)?.min(64)),
        }),
    };
    let between: Option<Vec<String>> = named.get("separators")?;
    let (sort, ascii) = (named.get::<Option<bool>>("sort_keys")?, named.get::<Option<bool>>("ensure_ascii")?);
    named.assert_all_used()?;
    let json =
        serde_json::to_value(value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let (item, key) = match between.as_deref() {
        Some([item, key]) => (item.as_str(), key.as_str()),
        _ => (if step.is_some() { "," } else { ", " }, ": "),
    };
    let text = write_json(&json, step.as_deref(), item, key, sort.unwrap_or(false), ascii.unwrap_or(false));
    Ok(Value::from_safe_string(text))
}
