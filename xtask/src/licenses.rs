//! The licence texts of the third-party crates in the commands, which must be distributed with them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::build::cargo;
use crate::error::{Context, Error, Result};

/// The package whose binaries are distributed, and their platform.
const PACKAGE: &str = "cloud-hypervisor";
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
/// Prefixes of the names of files with licence texts, in lower case.
const NAMES: [&str; 6] = ["license", "licence", "copying", "copyright", "notice", "unlicense"];
/// The licence of this project, for crates that use it as well and contain no text.
const OWN: &str = "Apache-2.0";

/// The start of the listing.
const HEAD: &str = "The commands are under the Apache License 2.0. They contain these third-party crates, each
followed by its licence.
Static binaries also contain Rust's standard library (MIT or Apache-2.0; its notices are in the toolchain's folder
share/doc/rust) and the C library that they were linked with (GNU C library: LGPL-2.1-or-later; in programs for guests
musl: MIT).
";

/// All texts, each once, after the names, versions and licences of its crates.
pub(crate) fn texts(workspace: &Path) -> Result<String> {
    let mut command = cargo(workspace);
    command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM]);
    let output = command.output().context("running cargo metadata")?;
    if !output.status.success() {
        return Err(Error::new(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim())));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("reading the output of cargo metadata")?;
    let own = fs::read_to_string(workspace.join("LICENSE")).context("reading LICENSE")?;
    let mut crates_of: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in linked(&metadata)? {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let name = format!("{} {} ({})", field("name"), field("version"), field("license"));
        let mut found = read_texts(Path::new(field("manifest_path")))?;
        if found.is_empty() && field("license").split([' ', '/']).any(|licence| licence == OWN) {
            found.push(own.clone());
        }
        if found.is_empty() {
            return Err(Error::new(format!("{name} has no licence text; add it by hand to xtask/src/licenses.rs")));
        }
        found.into_iter().for_each(|text| crates_of.entry(text).or_default().push(name.clone()));
    }
    let line = "=".repeat(80);
    let mut all = HEAD.to_string();
    for (text, mut names) in crates_of {
        names.sort();
        all.push_str(&format!("\n{line}\n{}\n{line}\n\n{}\n", names.join("\n"), text.trim_end()));
    }
    Ok(all)
}

/// The third-party packages whose code is in the commands: all dependencies except build scripts, tests and macros.
fn linked(metadata: &Value) -> Result<Vec<&Value>> {
    let list = |value: &'_ Value| value.as_array().cloned().unwrap_or_default();
    let id = |value: &Value| value["id"].as_str().map(str::to_string);
    let packages: BTreeMap<_, _> = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|package| Some((id(package)?, package)))
        .collect();
    let nodes: BTreeMap<_, _> = metadata["resolve"]["nodes"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|node| Some((id(node)?, node)))
        .collect();
    let own = packages.iter().find(|(_, package)| package["name"] == PACKAGE);
    let mut waiting = vec![own.ok_or_else(|| Error::new(format!("cargo metadata knows no {PACKAGE}")))?.0.clone()];
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        let (Some(node), Some(package)) = (nodes.get(&id), packages.get(&id)) else { continue };
        let is_macro =
            list(&package["targets"]).iter().any(|target| list(&target["kind"]).contains(&"proc-macro".into()));
        if is_macro || !seen.insert(id) {
            continue;
        }
        let is_normal = |dependency: &Value| list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        let normal = list(&node["deps"]).into_iter().filter(is_normal);
        waiting.extend(normal.filter_map(|dependency| dependency["pkg"].as_str().map(str::to_string)));
    }
    let third_party = seen.iter().filter_map(|id| packages.get(id).copied());
    Ok(third_party.filter(|package| !package["source"].is_null()).collect())
}

/// The licence texts next to a manifest, also in a folder of such a name.
fn read_texts(manifest: &Path) -> Result<Vec<String>> {
    let folder = manifest.parent().unwrap_or(manifest);
    let mut texts = BTreeSet::new();
    let mut waiting = entries(folder)?;
    waiting.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        NAMES.iter().any(|known| name.starts_with(known)) && !name.ends_with(".rs")
    });
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            waiting.extend(entries(&path)?);
        } else {
            let text = fs::read(&path).context(path.display())?;
            texts.insert(String::from_utf8_lossy(&text).replace("\r\n", "\n").trim_end().to_string());
        }
    }
    Ok(texts.into_iter().collect())
}

fn entries(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let entries = fs::read_dir(folder).context(folder.display())?;
    entries.map(|entry| entry.map(|entry| entry.path()).context(folder.display())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_third_party_crate_is_listed_with_its_licence() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let texts = texts(workspace).unwrap();
        for name in ["\nkvm-bindings ", "\nserde ", "\nhyper ", "\nrustix ", "\nvm-memory "] {
            assert!(texts.contains(name), "{name}");
        }
        // Apache-2.0, MIT and BSD.
        for text in
            ["Apache License", "Permission is hereby granted, free of charge", "Redistribution and use in source"]
        {
            assert!(texts.contains(text), "{text}");
        }
        // A test's dependency, a macro, and this project's own.
        for name in ["\nproptest ", "\nserde_derive ", "\nvirtio-devices "] {
            assert!(!texts.contains(name), "{name}");
        }
    }
}
