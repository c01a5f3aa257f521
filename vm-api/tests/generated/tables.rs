//! Tables of options in docs, which are those of `--help`.
//!
//! A table is between two comments. The first names the keys of `--net`:
//! `<!-- keys of --net, by cargo xtask generate: vlan, trunk -->` and `<!-- end of keys -->`.

use vm_api::config::{Key, NetConfig, Options, VfConfig};

const BEGIN: &str = "<!-- keys of --net, by cargo xtask generate: ";
const END: &str = "<!-- end of keys -->";

#[test]
fn the_policy_keys_of_the_docs_are_those_of_net() {
    crate::check("docs/policy.md", with_tables);
}

#[test]
fn the_switch_keys_of_the_docs_are_those_of_net() {
    crate::check("docs/switch.md", with_tables);
}

/// The page with its tables as they should be.
fn with_tables(page: &str) -> String {
    let mut parts = page.split(BEGIN);
    let mut text = parts.next().unwrap().to_string();
    let mut tables = 0;
    for part in parts {
        let (names, rest) = part.split_once(" -->\n").unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        text += &format!("{BEGIN}{names} -->\n{}{END}{after}", table(names));
        tables += 1;
    }
    assert!(tables > 0, "no table of keys");
    text
}

fn table(names: &str) -> String {
    let (of_net, of_vf) = (NetConfig::keys(), VfConfig::keys());
    let row = |name: &str| {
        let key = of_net.iter().find(|key| key.name == name).unwrap_or_else(|| panic!("--net has no key {name}"));
        let functions = if of_vf.iter().any(|key| key.name == name) { "PF, VF" } else { "PF" };
        let Key { name, syntax, default, about, .. } = key;
        let default = default.as_ref().map(|default| format!(" By default {default}.")).unwrap_or_default();
        let (syntax, about) = (escaped(syntax), escaped(about));
        format!("| `{name}={syntax}` | {functions} | {about}{default} |\n")
    };
    let rows: String = names.split(", ").map(row).collect();
    format!("| key | of | what it does |\n|---|---|---|\n{rows}")
}

/// The text of a cell, which a bar would end.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}
