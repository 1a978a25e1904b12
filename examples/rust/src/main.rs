//! chat BUNDLE [TOKENIZER]: a line of standard input is a message, and the answer comes as it is written. TOKENIZER: the
//! tokenizer's library (edgespec/runtimes/tokenizer), if the system does not find it by its name.
use std::error::Error;
use std::io::Write;
use std::path::Path;

use edgespec::{Bundle, Message, Settings};

fn run(folder: &Path, tokenizer: Option<&Path>) -> Result<(), Box<dyn Error>> {
    let mut bundle = Bundle::open(folder, 0)?;
    // SAFETY: the user names the library of the tokenizer, and no other one.
    unsafe { bundle.load_codec(tokenizer)? };
    let (mut session, mut messages) = (bundle.session(&Default::default())?, Vec::new());
    let settings = Settings { max_new_tokens: Some(400), ..Default::default() };
    for line in std::io::stdin().lines() {
        messages.push(Message::new("user", line?));
        let mut answer = String::new();
        for round in session.chat(&messages, None, &settings)? {
            let text = round?.text;
            print!("{text}");
            std::io::stdout().flush()?;
            answer += &text;
        }
        println!();
        messages.push(Message::new("assistant", answer));
    }
    Ok(())
}

fn main() {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let (Some(bundle), true) = (words.first(), words.len() < 3) else {
        eprintln!("expected: chat BUNDLE [TOKENIZER]");
        std::process::exit(2);
    };
    if let Err(error) = run(bundle.as_ref(), words.get(1).map(Path::new)) {
        eprintln!("chat: {error}");
        std::process::exit(1);
    }
}
