//! Writes shell completions and man pages from the definitions of the command lines:
//! `cargo run --example generate -- FOLDER`.

#![expect(dead_code, reason = "only the definitions of the command lines are needed")]

#[path = "../src/remote/add.rs"]
mod add;
#[path = "../src/cli.rs"]
mod cli;
#[path = "../src/remote/command.rs"]
mod command;
#[path = "../src/remote/descriptor.rs"]
mod descriptor;
#[path = "../src/error.rs"]
mod error;
#[path = "../src/log_format.rs"]
mod log_format;
#[path = "../src/remote/vf_change.rs"]
mod vf_change;
#[path = "../src/vm_options.rs"]
mod vm_options;

use std::env::args_os;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(args_os().nth(1).ok_or("usage: generate FOLDER")?);
    for command in [cli::Cli::command(), command::Cli::command()] {
        generate(command.disable_help_subcommand(true), &folder)?;
    }
    Ok(())
}

/// Writes completions for each shell, and a man page for the command and each of its subcommands.
fn generate(mut command: clap::Command, folder: &Path) -> Result<(), Box<dyn Error>> {
    let name = command.get_name().to_string();
    let (completions, pages) = (folder.join("completions"), folder.join("man"));
    fs::create_dir_all(&completions)?;
    fs::create_dir_all(&pages)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, &name, &completions)?;
    }
    clap_mangen::generate_to(with_short_version(command), &pages)?;
    Ok(())
}

/// Reduces the version to its first line without `v`: the title of a page is one line, and clap_mangen adds the `v`.
fn with_short_version(command: clap::Command) -> clap::Command {
    let line = command.get_version().and_then(|version| version.lines().next());
    match line.map(|line| line.trim_start_matches('v').to_string()) {
        // Leaked for the rest of this short run.
        Some(version) => command.version(&*version.leak()),
        None => command,
    }
}
