//! Completions and man pages name every option and subcommand.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tempfile::tempdir;

const COMMANDS: [&str; 2] = [env!("CARGO_BIN_EXE_cloud-hypervisor"), env!("CARGO_BIN_EXE_ch-remote")];

/// The example, which cargo builds next to the commands when it builds tests.
fn generator() -> PathBuf {
    let folder = PathBuf::from(COMMANDS[0]);
    folder.parent().unwrap().join("examples/generate")
}

/// The words of `text` that begin with `begin`, up to the end of the name.
fn words<'a>(text: &'a str, begin: &'a str) -> impl Iterator<Item = &'a str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    text.split(move |c: char| !is_name(c)).filter(move |word| word.starts_with(begin) && word.len() > begin.len())
}

#[test]
fn completions_and_pages_name_every_option_and_subcommand() {
    let folder = tempdir().unwrap();
    assert!(Command::new(generator()).arg(folder.path()).status().unwrap().success());
    let read = |name: String| fs::read_to_string(folder.path().join(name)).unwrap();
    for command in COMMANDS {
        let name = command.rsplit('/').next().unwrap();
        let help = String::from_utf8(Command::new(command).arg("--help").output().unwrap().stdout).unwrap();
        // Examples and value descriptions may name options of the other command.
        let options = help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(|line| words(line, "--"));
        let options: Vec<_> = options.filter(|option| !option.ends_with('-')).collect();
        assert!(options.len() > 3, "{help}");
        let (bash, page) = (read(format!("completions/{name}.bash")), read(format!("man/{name}.1")));
        let title: Vec<_> = page.lines().skip_while(|line| !line.starts_with(".TH")).take(2).collect();
        assert!(title[0].matches('"').count() == 2 && title[1] == ".SH NAME", "{title:?}");
        for option in options {
            assert!(bash.contains(option), "{option} in completions of {name}");
            assert!(page.contains(&option.replace('-', "\\-")), "{option} in the page of {name}");
        }
    }
    for (subcommand, option) in [("add-net", "vf"), ("set-vf", "link"), ("vfs", "watch"), ("create", "kernel")] {
        let page = read(format!("man/ch-remote-{subcommand}.1"));
        assert!(page.contains(&format!("\\-\\-{option}")), "{subcommand}");
        assert!(read("completions/_ch-remote".to_string()).contains(subcommand));
    }
}
