//! Writes shell completions and man pages from the definitions of the command lines:
//! `cargo run --example generate -- FOLDER`.

#![expect(dead_code, reason = "only the definitions of the command lines are needed")]

#[path = "../src/remote/add.rs"]
mod add;
#[path = "generate/bash.rs"]
mod bash;
#[path = "../src/cli.rs"]
mod cli;
#[path = "../src/remote/command.rs"]
mod command;
#[path = "../src/remote/descriptor.rs"]
mod descriptor;
#[path = "../src/error.rs"]
mod error;
#[path = "../src/remote/indices.rs"]
mod indices;
#[path = "../src/log_format.rs"]
mod log_format;
#[path = "generate/man.rs"]
mod man;
#[path = "../src/usage.rs"]
mod usage;
#[path = "../src/remote/vf_change.rs"]
mod vf_change;
#[path = "../vfctl/src/command.rs"]
mod vf_command;
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
    for command in [cli::Cli::command(), command::Cli::command(), vf_command::Cli::command()] {
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
    for shell in [Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, &name, &completions)?;
    }
    command.build();
    fs::write(completions.join(format!("{name}.bash")), bash::script(&command))?;
    let mut command = with_short_version(command);
    command.build();
    page(&command, &name, &pages)?;
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        page(subcommand, &format!("{name}-{}", subcommand.get_name()), &pages)?;
    }
    Ok(())
}

/// Writes the page of a command with this name.
fn page(command: &clap::Command, name: &str, folder: &Path) -> Result<(), Box<dyn Error>> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone()).title(name).render(&mut text)?;
    fs::write(folder.join(format!("{name}.1")), man::mended(&String::from_utf8(text)?, command))?;
    Ok(())
}

/// True if `text` is the name of a key of an option.
fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
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
