//! Values as Python writes them: `str`, `repr` and `json.dumps`.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::Value;
use serde_json::Value as Json;

/// Write a value as `str` does; what is undefined is an empty text.
pub fn write_value(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.into(),
        None if value.is_undefined() => String::new(),
        None => representation(value),
    }
}

fn representation(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => "Undefined".into(),
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).map_or(value.to_string(), float),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(|one| representation(&one)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let pair = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", representation(&key), representation(&item))
            };
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(pair).collect();
            format!("{{{}}}", items.join(", "))
        }
        _ => value.to_string(),
    }
}

fn quoted(text: &str) -> String {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut made = String::from(mark);
    for one in text.chars() {
        match one {
            '\n' => made.push_str("\\n"),
            '\r' => made.push_str("\\r"),
            '\t' => made.push_str("\\t"),
            '\\' => made.push_str("\\\\"),
            one if one == mark => made.extend(['\\', one]),
            one if (one as u32) < 32 || one as u32 == 127 => {
                let _ = write!(made, "\\x{:02x}", one as u32);
            }
            one => made.push(one),
        }
    }
    made.push(mark);
    made
}

/// Write a number as Python does: 1.0, 1e+16, 1e-07.
fn float(number: f64) -> String {
    let made = format!("{number:?}");
    let Some((digits, power)) = made.split_once('e') else { return made.replace("NaN", "nan") };
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
    format!("{digits}e{sign}{power:0>2}")
}

/// Write JSON as `json.dumps` does.
///
/// step: what a level is indented by; None: all in one line.  item, key: what follows those.
pub fn write_json(value: &Json, step: Option<&str>, item: &str, key: &str, sort: bool, ascii: bool) -> String {
    let mut out = Writer { out: String::new(), step, item, key, sort, ascii };
    out.write(value, 1);
    out.out
}

struct Writer<'a> {
    out: String,
    step: Option<&'a str>,
    item: &'a str,
    key: &'a str,
    sort: bool,
    ascii: bool,
}

impl Writer<'_> {
    fn write(&mut self, value: &Json, level: usize) {
        match value {
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(number) => self.out.push_str(&float(number)),
                None => self.out.push_str(&number.to_string()),
            },
            Json::String(text) => self.text(text),
            Json::Array(items) if !items.is_empty() => {
                self.out.push('[');
                for (at, one) in items.iter().enumerate() {
                    self.line(at > 0, level);
                    self.write(one, level + 1);
                }
                self.line_end(level - 1);
                self.out.push(']');
            }
            Json::Object(fields) if !fields.is_empty() => {
                let mut all: Vec<_> = fields.iter().collect();
                if self.sort {
                    all.sort_by_key(|(name, _)| *name);
                }
                self.out.push('{');
                for (at, (name, one)) in all.into_iter().enumerate() {
                    self.line(at > 0, level);
                    self.text(name);
                    self.out.push_str(self.key);
                    self.write(one, level + 1);
                }
                self.line_end(level - 1);
                self.out.push('}');
            }
            short => self.out.push_str(&short.to_string()),
        }
    }

    fn line(&mut self, next: bool, level: usize) {
        if next {
            self.out.push_str(self.item);
        }
        self.line_end(level);
    }

    fn line_end(&mut self, level: usize) {
        if let Some(step) = self.step {
            self.out.push('\n');
            self.out.push_str(&step.repeat(level));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for one in text.chars() {
            match one {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                one if (one as u32) < 32 || (self.ascii && !one.is_ascii()) => {
                    for unit in one.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                one => self.out.push(one),
            }
        }
        self.out.push('"');
    }
}
