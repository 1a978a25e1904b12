//! Over the bundle that EDGESPEC_BUNDLE names, which has a draft model: golden texts of Python, and what calls promise.
use std::fs;
use std::path::PathBuf;
use std::thread;

use edgespec::{Bundle, Error, Finish, Kind, Result, Session, SessionOptions, Settings};

fn folder() -> PathBuf {
    std::env::var_os("EDGESPEC_BUNDLE").expect("EDGESPEC_BUNDLE names a native bundle").into()
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
    begun(&[1], &settings("plain", 4)).unwrap(); // and nothing was lost
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
