//! generate BUNDLE PROMPT [NEW]: continues a text as it comes, with Hugging Face's tokenizers and a native bundle.
use std::error::Error;
use std::io::Write;
use std::path::Path;

use edgespec::{Bundle, Settings};
use tokenizers::Tokenizer;

fn run(folder: &Path, prompt: &str, new: i64) -> Result<(), Box<dyn Error + Send + Sync>> {
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
    let ids: Vec<i64> = tokenizer.encode(prompt, true)?.get_ids().iter().map(|&id| id.into()).collect();
    let mut session = Bundle::open(folder, 0)?.session(&Default::default())?;
    let settings = Settings { max_new_tokens: Some(new), ..Default::default() };
    let mut words = tokenizer.decode_stream(true);
    for round in session.begin(&ids, &settings)? {
        for token in round?.tokens {
            print!("{}", words.step(token.try_into()?)?.unwrap_or_default());
        }
        std::io::stdout().flush()?;
    }
    println!();
    let counts = session.counts()?;
    eprintln!("{} tokens in {} passes, {} guesses accepted", counts.tokens, counts.rounds, counts.accepted);
    Ok(())
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let new = words.get(2).map_or(Ok(64), |count| count.parse());
    let (Some(bundle), Some(prompt), Ok(new)) = (words.first(), words.get(1), new) else {
        eprintln!("expected: generate BUNDLE PROMPT [NEW]");
        std::process::exit(2);
    };
    if let Err(error) = run(Path::new(bundle), prompt, new) {
        eprintln!("generate: {error}");
        std::process::exit(1);
    }
}
