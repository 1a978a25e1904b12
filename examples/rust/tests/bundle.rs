//! Over the bundle that EDGESPEC_BUNDLE names: what Python exported with it, and what passes promise.

use std::path::PathBuf;

use edgespec::{greedy, Model, Rows};

fn bundle() -> PathBuf {
    std::env::var_os("EDGESPEC_BUNDLE").expect("EDGESPEC_BUNDLE names a native bundle").into()
}

fn model() -> Model {
    Model::open(&bundle().join("model.native.onnx"), 2).unwrap()
}

#[test]
fn golden_tokens() {
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(bundle().join("edgespec.json")).unwrap()).unwrap();
    let ends: Vec<i64> = serde_json::from_value(manifest["tokenizer"]["eos"].clone()).unwrap();
    let golden = manifest["golden"].as_array().unwrap();
    assert!(!golden.is_empty());
    for one in golden {
        let tokens = |key: &str| -> Vec<i64> { serde_json::from_value(one[key].clone()).unwrap() };
        let wanted = tokens("tokens");
        let (written, passes) = greedy(&model(), &tokens("prompt"), wanted.len(), &ends).unwrap();
        assert_eq!(written, wanted);
        assert!(passes <= written.len());
    }
}

#[test]
fn a_branch_of_a_tree_is_a_chain() {
    let model = model();
    let facts = model.facts().unwrap();
    assert!(facts.layers > 0 && facts.weight_bytes > 0);
    let (mut tree, mut chain) = (model.cache(2, 64).unwrap(), model.cache(1, 64).unwrap());
    tree.prefill(1, &[5, 6, 7]).unwrap();
    chain.prefill(0, &[5, 6, 7]).unwrap();
    let rows = Rows { tokens: &[8, 9, 10, 11], parents: Some(&[-1, 0, 0, 2]), slots: Some(&[1; 4]), ..Rows::default() };
    let found = tree.pass(rows).unwrap();
    let branch = chain.pass(Rows { tokens: &[8, 10, 11], hidden: true, ..Rows::default() }).unwrap();
    assert_eq!(branch.hidden.len(), 3 * facts.hidden as usize);
    for (row, same) in [(0, 0), (2, 1), (3, 2)] {
        let of = |pass: &edgespec::Pass, row: usize| pass.logits[row * pass.columns..(row + 1) * pass.columns].to_vec();
        assert_eq!(of(&found, row), of(&branch, same));
    }
    tree.keep(1, &[0, 2, 3]).unwrap();
    assert_eq!(tree.length(1), Some(6));
    assert_eq!(tree.crop(1, 4).unwrap(), if facts.stateful == 1 { 0 } else { 4 });
    assert_eq!(tree.length(2), None);
}

#[test]
fn refusals_are_errors() {
    let error = Model::open(&bundle(), 1).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no file"), "{error}");
    let mut cache = model().cache(1, 64).unwrap();
    let error = cache.pass(Rows { tokens: &[-5], ..Rows::default() }).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("outside the vocabulary"), "{error}");
    assert!(cache.pass(Rows { tokens: &[1, 2], parents: Some(&[-1]), ..Rows::default() }).is_err());
}
