//! The command `cloud-hypervisor`: turns arguments into a VM and an exit code.

mod cli;
mod error;
mod log_format;
mod usage;
mod vm_options;

use std::error::Error;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use rustix::fs::{Mode, OFlags};
use tracing_subscriber::filter::LevelFilter;
use vmm::ErrorKind;
use vmm::config::{VmConfig, json};

use crate::cli::Cli;
use crate::error::CommandError;
use crate::log_format::Format;

fn main() -> ExitCode {
    // Files created by this process are private to this user.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&chain(&error));
            error.kind().exit_code().into()
        }
    }
}

/// Runs until the VM ends.
fn run(cli: Cli) -> Result<(), CommandError> {
    let start = Instant::now();
    let (verbose, log_file, print_config) = (cli.verbose, cli.log_file.clone(), cli.print_config);
    let log_format = cli.log_format.clone();
    let options = cli.into_options()?;
    if let (true, Some(vm)) = (print_config, &options.vm) {
        return print(vm.config());
    }
    match log_format {
        Some(format) => log_as(format, start, log_file.as_deref(), verbose)?,
        None => log_to(log_file.as_deref(), verbose)?,
    }
    vmm::run(options)?;
    Ok(())
}

/// Prints a VM.
fn print(vm: &VmConfig) -> Result<(), CommandError> {
    vm.payload.check_present().map_err(vmm::Error::from)?;
    let mut output = std::io::stdout().lock();
    let mut text = Vec::new();
    let mut pretty = serde_json::Serializer::pretty(&mut text);
    json::serialize(vm, &mut pretty).map_err(std::io::Error::from)?;
    text.push(b'\n');
    output.write_all(&text)?;
    Ok(())
}

/// Handles a command line that is invalid, or that requests help or the version.
fn refuse(error: &clap::Error) -> ExitCode {
    let given: Vec<_> = std::env::args_os().skip(1).map(|given| given.to_string_lossy().into_owned()).collect();
    match cli::report(error, &given) {
        Some(line) => {
            say(&line);
            ErrorKind::Syntax.exit_code().into()
        }
        None => {
            // Help or version. If printing fails, nothing is left to do.
            let _ = error.print();
            if error.use_stderr() { ErrorKind::Syntax.exit_code().into() } else { ExitCode::SUCCESS }
        }
    }
}

/// Reports an error in one line.
fn say(line: &str) {
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "cloud-hypervisor: {line}");
}

/// An error and its causes, except those that the error's own text contains.
fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    line
}

/// Creates or truncates the log file, or opens a named pipe, which need not have a reader yet.
fn create(path: &Path) -> Result<File, CommandError> {
    // A pipe opened for reading, too, needs no other reader. Output that does not fit is dropped, so that no thread
    // waits.
    let is_pipe = std::fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo());
    let flags = if is_pipe { OFlags::NONBLOCK } else { OFlags::empty() };
    vmm::create_file(path, is_pipe, flags).map_err(|error| CommandError::LogFile { path: path.to_owned(), error })
}

/// Sends the log to a file or to standard error, in this format.
fn log_as(format: Format, start: Instant, file: Option<&Path>, verbose: u8) -> Result<(), CommandError> {
    let level = match verbose {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let started = match file {
        Some(path) => log_format::start(format, level, start, create(path)?),
        None => log_format::start(format, level, start, std::io::stderr()),
    };
    started.map_err(|error| CommandError::Log(Box::new(error)))
}

/// Sends the log to a file or to standard error.
fn log_to(file: Option<&Path>, verbose: u8) -> Result<(), CommandError> {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    // Reporting its own write errors on a closed standard error would panic, and end the guest.
    let log = tracing_subscriber::fmt().with_max_level(level).log_internal_errors(false);
    let started = match file {
        Some(path) => log.with_ansi(false).with_writer(create(path)?).try_init(),
        None => log.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr).try_init(),
    };
    started.map_err(CommandError::Log)
}
