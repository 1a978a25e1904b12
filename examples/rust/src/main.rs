//! greedy BUNDLE PROMPT [NEW]: continues a text, with Hugging Face's tokenizers and a native bundle.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use edgespec::{greedy, isa, Model};
use tokenizers::Tokenizer;

fn run(bundle: &Path, prompt: &str, new: usize) -> Result<(), Box<dyn Error>> {
    let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(bundle.join("edgespec.json"))?)?;
    let facts = &manifest["tokenizer"];
    let ends: Vec<i64> = serde_json::from_value(facts["eos"].clone())?;
    let graph = manifest["target"]["graphs"]["native"]["file"].as_str().ok_or("a bundle without a native graph")?;
    let tokenizer = Tokenizer::from_file(bundle.join("tokenizer.json")).map_err(|error| error.to_string())?;
    let encoding = tokenizer.encode(prompt, true).map_err(|error| error.to_string())?;
    let tokens: Vec<i64> = encoding.get_ids().iter().map(|id| i64::from(*id)).collect();
    let model = Model::open(&bundle.join(graph), 0)?;
    let (written, passes) = greedy(&model, &tokens, new, &ends)?;
    let ids = written.iter().map(|id| u32::try_from(*id)).collect::<Result<Vec<_>, _>>()?;
    let text = tokenizer.decode(&ids, true).map_err(|error| error.to_string())?;
    println!("{text}");
    eprintln!("{} tokens in {passes} passes, {} kernels", written.len(), isa());
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let new = words.get(2).map_or(Ok(64), |count| count.parse());
    let (Some(bundle), Some(prompt), Ok(new)) = (words.first(), words.get(1), new) else {
        eprintln!("expected: greedy BUNDLE PROMPT [NEW]");
        return ExitCode::from(2);
    };
    match run(Path::new(bundle), prompt, new) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("greedy: {error}");
            ExitCode::FAILURE
        }
    }
}
