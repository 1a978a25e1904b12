//! Over the bundle that EDGESPEC_BUNDLE names, which has a draft model and a chat template: golden texts of Python, and
//! what calls promise. EDGESPEC_TOKENIZER is the tokenizer's library, EDGESPEC_ADAPTER a LoRA adapter of the target.
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use edgespec::{Bundle, Error, Finish, Kind, Message, Result, Round, Session, SessionOptions, Settings};

fn named(name: &str) -> PathBuf {
    std::env::var_os(name).unwrap_or_else(|| panic!("{name} names a path")).into()
}

fn folder() -> PathBuf {
    named("EDGESPEC_BUNDLE")
}

fn loaded(bundle: &mut Bundle, library: Option<&Path>) -> Result<()> {
    // SAFETY: of the tokenizer, or no file.
    unsafe { bundle.load_codec(library) }
}

fn with_codec() -> Bundle {
    let mut made = bundle();
    loaded(&mut made, Some(&named("EDGESPEC_TOKENIZER"))).unwrap();
    made
}

fn text_of(rounds: &[Round]) -> String {
    rounds.iter().map(|round| round.text.as_str()).collect()
}

fn kind_of<T>(found: Result<T>) -> Kind {
    found.map(drop).unwrap_err().kind()
}

fn bundle() -> Bundle {
    Bundle::open(folder(), 1).unwrap()
}

fn golden() -> Vec<(Vec<i64>, Vec<i64>)> {
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(folder().join("edgespec.json")).unwrap()).unwrap();
    let tokens = |one: &serde_json::Value| -> Vec<i64> { serde_json::from_value(one.clone()).unwrap() };
    let found: Vec<_> = manifest["golden"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (tokens(&one["prompt"]), tokens(&one["tokens"])))
        .collect();
    assert!(!found.is_empty());
    found
}

fn settings(method: &str, tokens: usize) -> Settings {
    Settings {
        method: Some(method.into()),
        max_new_tokens: Some(tokens as i64),
        guesses: Some(4),
        fixed: true,
        ..Settings::default()
    }
}

fn write(session: &mut Session, prompt: &[i64], settings: &Settings) -> Result<Vec<i64>> {
    let rounds: Vec<_> = session.begin(prompt, settings)?.collect::<Result<_>>()?;
    assert!(rounds.iter().rev().skip(1).all(|round| round.finish.is_none()));
    Ok(rounds.into_iter().flat_map(|round| round.tokens).collect())
}

#[test]
fn texts_of_python_by_every_method() {
    let mut session = bundle().session(&SessionOptions::default()).unwrap(); // which keeps the bundle open
    for (prompt, wanted) in golden() {
        for method in ["plain", "ngram", "speculative", "self-spec", "ngram,speculative"] {
            assert_eq!(write(&mut session, &prompt, &settings(method, wanted.len())).unwrap(), wanted, "{method}");
        }
    }
    let counts = session.counts().unwrap();
    assert!(counts.accepted > 0 && counts.drafted >= counts.accepted && counts.dropped.is_empty());
}

#[test]
fn the_last_round_says_why() {
    let mut session = bundle().session(&SessionOptions::default()).unwrap();
    let (prompt, tokens) = golden().remove(0);
    let by_length = session.begin(&prompt, &settings("plain", 3)).unwrap().last().unwrap().unwrap();
    assert_eq!(by_length.finish, Some(Finish::Length));
    let stop = Settings { stops: vec![tokens[2]], logprobs: true, ..settings("speculative", 64) };
    let rounds: Vec<_> = session.begin(&prompt, &stop).unwrap().collect::<Result<_>>().unwrap();
    let last = rounds.last().unwrap();
    assert_eq!((last.finish, last.tokens.last()), (Some(Finish::Stop), Some(&tokens[2])));
    assert!(rounds.iter().all(|round| round.logprobs.len() == round.tokens.len()));
}

#[test]
fn errors_have_kinds_and_words() {
    let said = |found: Result<()>, kind: Kind, words: &str| {
        let error: Error = found.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    said(Bundle::open("no/such/folder", 1).map(drop), Kind::NoFile, "no/such/folder");
    said(Bundle::open("a\0b", 1).map(drop), Kind::Refused, "without zeros");
    let mut session = bundle().session(&SessionOptions { context: Some(256), ..Default::default() }).unwrap();
    let mut begun = |prompt: &[i64], settings: &Settings| session.begin(prompt, settings).map(drop);
    said(begun(&[1], &settings("no such", 4)), Kind::Refused, "no such");
    said(begun(&[1], &settings("p\0", 4)), Kind::Refused, "without zeros");
    said(begun(&[-1], &settings("plain", 4)), Kind::Refused, "-1");
    said(begun(&[], &settings("plain", 4)), Kind::Refused, "");
    said(begun(&[1; 400], &settings("plain", 4)), Kind::Full, "");
    said(begun(&[1], &Settings { temperature: -1.0, ..Settings::default() }), Kind::Refused, "temperature");
    // zero is the default in C, and asked for by None
    said(begun(&[1], &Settings { max_new_tokens: Some(0), ..Settings::default() }), Kind::Refused, "max_new_tokens 0");
    said(begun(&[1], &Settings { top_p: Some(0.0), ..Settings::default() }), Kind::Refused, "top_p 0");
    said(begun(&[1], &Settings { guesses: Some(0), ..Settings::default() }), Kind::Refused, "guesses 0");
    begun(&[1], &settings("plain", 4)).unwrap(); // and nothing was lost
    let limited = |options: SessionOptions| bundle().session(&options).map(drop);
    said(limited(SessionOptions { max_bytes: Some(0), ..Default::default() }), Kind::Refused, "max_bytes 0");
    said(limited(SessionOptions { context: Some(0), ..Default::default() }), Kind::Refused, "context 0");
}

#[test]
fn another_thread_cancels() {
    let mut session = bundle().session(&SessionOptions::default()).unwrap();
    let canceller = session.canceller();
    let (prompt, _) = golden().remove(0);
    let mut text = session.begin(&prompt, &Settings { ignore_eos: true, ..settings("plain", 100) }).unwrap();
    text.next().unwrap().unwrap();
    let other = canceller.clone();
    thread::spawn(move || other.cancel()).join().unwrap();
    assert_eq!(text.next().unwrap().unwrap_err().kind(), Kind::Cancelled);
    assert!(text.next().is_none());
    drop(session);
    canceller.cancel(); // nothing is left to be cancelled
}

#[test]
fn sessions_of_threads_share_a_bundle() {
    let (bundle, golden) = (bundle(), golden());
    thread::scope(|scope| {
        for (prompt, wanted) in &golden {
            let mut session = bundle.session(&SessionOptions::default()).unwrap();
            scope.spawn(move || {
                assert_eq!(&write(&mut session, prompt, &settings("speculative", wanted.len())).unwrap(), wanted);
            });
        }
    });
}

#[test]
fn a_saved_text_is_not_read_again() {
    let file = std::env::temp_dir().join(format!("edgespec-rust-{}", std::process::id()));
    let (prompt, wanted) = golden().remove(0);
    let mut first = bundle().session(&SessionOptions::default()).unwrap();
    write(&mut first, &prompt, &settings("plain", 8)).unwrap();
    first.save(&file).unwrap();
    let mut second = bundle().session(&SessionOptions::default()).unwrap();
    let kept = second.restore(&file).unwrap();
    assert!(kept >= prompt.len() as i64);
    fs::write(&file, b"no session").unwrap();
    assert_eq!(first.restore(&file).unwrap_err().kind(), Kind::Refused);
    fs::remove_file(&file).unwrap();
    assert_eq!(write(&mut second, &prompt, &settings("plain", wanted.len())).unwrap(), wanted);
    assert!(second.counts().unwrap().reused_tokens > 0);
}

#[test]
fn text_becomes_tokens_and_back() {
    let bundle = with_codec();
    for text in ["My lord,", "", "caf\u{e9} \u{1f600}", "a\0b", &"to be or not ".repeat(400)] {
        let tokens = bundle.encode(text, false).unwrap();
        assert_eq!(bundle.decode(&tokens).unwrap(), text);
        assert!(text.len() < 1000 || tokens.len() > 512); // more than the first call has room for
    }
    assert_eq!(kind_of(bundle.decode(&[-1])), Kind::Refused);
    let without = self::bundle();
    assert_eq!(kind_of(without.encode("a", true)), Kind::Refused);
    let mut session = without.session(&Default::default()).unwrap();
    assert_eq!(kind_of(session.chat(&[Message::new("user", "a")], None, &Settings::default())), Kind::Refused);
    let (prompt, _) = golden().remove(0);
    let ends = Settings { stop_texts: vec!["a".into()], ..settings("plain", 4) };
    assert_eq!(kind_of(session.begin(&prompt, &ends)), Kind::Refused);
}

#[test]
fn rounds_have_text_until_a_stop_text() {
    let bundle = with_codec();
    let mut session = bundle.session(&Default::default()).unwrap();
    let (prompt, wanted) = golden().remove(0);
    for method in ["plain", "speculative"] {
        let rounds: Vec<_> =
            session.begin(&prompt, &settings(method, wanted.len())).unwrap().collect::<Result<_>>().unwrap();
        let whole = bundle.decode(&[prompt.clone(), wanted.clone()].concat()).unwrap();
        let written = text_of(&rounds);
        assert!(!written.is_empty() && whole.ends_with(&written));
        let middle = written.char_indices().nth(written.chars().count() / 2).unwrap().0;
        let end: String = written[middle..].chars().take(3).collect();
        let ended = Settings { stop_texts: vec!["never there".into(), end.clone()], ..settings(method, wanted.len()) };
        let rounds: Vec<_> = session.begin(&prompt, &ended).unwrap().collect::<Result<_>>().unwrap();
        assert_eq!(rounds.last().unwrap().finish, Some(Finish::StopText));
        assert_eq!(text_of(&rounds), written[..written.find(&end).unwrap()]);
    }
    let zero = Settings { stop_texts: vec!["a\0".into()], ..settings("plain", 4) };
    assert_eq!(kind_of(session.begin(&prompt, &zero)), Kind::Refused);
}

#[test]
fn a_conversation_is_its_tokens() {
    let bundle = with_codec();
    let mut session = bundle.session(&Default::default()).unwrap();
    let said = [Message::new("user", "Who is there?"), Message::json(r#"{"role": "assistant", "content": "I."}"#)];
    let prompt = bundle.encode_chat(&said, None).unwrap();
    let shown = bundle.decode(&prompt).unwrap();
    assert!(shown.contains("Who is there?") && shown.contains("I."), "{shown}");
    let shorter = bundle.encode_chat(&said, Some(r#"{"generation_prompt": false}"#)).unwrap();
    assert!(shorter.len() < prompt.len() && prompt.starts_with(&shorter));
    let answered: Vec<_> = session.chat(&said, None, &settings("plain", 16)).unwrap().collect::<Result<_>>().unwrap();
    let answered: Vec<i64> = answered.into_iter().flat_map(|round: Round| round.tokens).collect();
    assert_eq!(answered, write(&mut session, &prompt, &settings("plain", 16)).unwrap());
    for (role, content, more) in [("a\0", "b", "{}"), ("user", "b\0", "{}"), ("user", "b", "\0"), ("user", "b", "{")] {
        assert_eq!(kind_of(bundle.encode_chat(&[Message::new(role, content)], Some(more))), Kind::Refused);
    }
    assert_eq!(kind_of(bundle.encode_chat(&[Message::json("no object")], None)), Kind::Refused);
    assert_eq!(kind_of(bundle.encode_chat(&[], None)), Kind::Refused);
}

#[test]
fn bundles_are_changed_before_others_have_them() {
    let mut bundle = bundle();
    assert_eq!(kind_of(loaded(&mut bundle, Some("no/such/file".as_ref()))), Kind::NoFile);
    let library = named("EDGESPEC_TOKENIZER");
    for other in 0..2 {
        let (clone, session) = (bundle.clone(), bundle.session(&Default::default()).unwrap());
        let _kept: Box<dyn std::any::Any> = if other == 0 { Box::new(clone) } else { Box::new(session) };
        assert_eq!(kind_of(loaded(&mut bundle, Some(&library))), Kind::Refused);
        assert_eq!(kind_of(bundle.add_adapter(named("EDGESPEC_ADAPTER"))), Kind::Refused);
    }
    loaded(&mut bundle, Some(&library)).unwrap();
    assert_eq!(kind_of(loaded(&mut bundle, Some(&library))), Kind::Refused); // once
}

#[test]
fn rounds_have_the_likeliest_tokens() {
    let mut session = bundle().session(&Default::default()).unwrap();
    let (prompt, _) = golden().remove(0);
    let asked = Settings { top_logprobs: 3, logprobs: true, ..settings("speculative", 20) };
    for round in session.begin(&prompt, &asked).unwrap() {
        let round = round.unwrap();
        assert_eq!(round.top_logprobs.len(), round.tokens.len());
        for ((token, logprob), top) in round.tokens.iter().zip(&round.logprobs).zip(&round.top_logprobs) {
            assert_eq!((top.len(), top[0]), (3, (*token, *logprob))); // of greedy decoding
            assert!(top.windows(2).all(|two| two[0].1 >= two[1].1));
        }
    }
    assert!(session.begin(&prompt, &settings("plain", 3)).unwrap().all(|round| round.unwrap().top_logprobs.is_empty()));
    assert_eq!(kind_of(session.begin(&prompt, &Settings { top_logprobs: 21, ..asked })), Kind::Refused);
}

#[test]
fn streamed_weights_and_fewer_threads_change_no_text() {
    assert_eq!(kind_of(Bundle::open_streamed(folder(), 1, 0)), Kind::Refused);
    let streamed = Bundle::open_streamed(folder(), 2, 1 << 30).unwrap();
    let mut session = streamed.session(&Default::default()).unwrap();
    let (prompt, wanted) = golden().remove(0);
    assert_eq!(kind_of(streamed.limit_threads(0)), Kind::Refused);
    let mut tokens = Vec::new();
    for round in session.begin(&prompt, &settings("speculative", wanted.len())).unwrap() {
        tokens.extend(round.unwrap().tokens);
        thread::scope(|scope| scope.spawn(|| streamed.limit_threads(1 + tokens.len() as u16 % 2)).join().unwrap())
            .unwrap();
    }
    assert_eq!(tokens, wanted);
}

#[test]
fn texts_name_adapters() {
    let mut with = bundle();
    assert_eq!(kind_of(with.add_adapter("no/such/folder")), Kind::NoFile);
    let adapter = with.add_adapter(named("EDGESPEC_ADAPTER")).unwrap();
    let mut session = with.session(&Default::default()).unwrap();
    let (prompt, wanted) = golden().remove(0);
    let adapted = Settings { adapter: Some(adapter), ..settings("speculative", wanted.len()) };
    let other = write(&mut session, &prompt, &adapted).unwrap();
    assert_ne!(other, wanted);
    assert_eq!(
        write(&mut session, &prompt, &Settings { method: Some("plain".into()), ..adapted.clone() }).unwrap(),
        other
    );
    assert_eq!(write(&mut session, &prompt, &settings("speculative", wanted.len())).unwrap(), wanted);
    let mut without = bundle().session(&Default::default()).unwrap();
    assert_eq!(kind_of(without.begin(&prompt, &adapted)), Kind::Refused);
}
