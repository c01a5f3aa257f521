//! The command `cloud-hypervisor`: turns arguments into a VM and an exit code.

mod cli;
mod error;
mod log_format;
mod usage;
mod vm_options;

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use rustix::fs::Mode;
use tracing_subscriber::filter::LevelFilter;
use vmm::config::{VmConfig, json};
use vmm::{ErrorKind, LogOutput};

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
    let mut options = cli.into_options()?;
    if let (true, Some(vm)) = (print_config, &options.vm) {
        return print(vm.config());
    }
    let output = Arc::new(log_output(log_file.as_deref())?);
    match log_format {
        Some(format) => log_as(format, start, Arc::clone(&output), verbose)?,
        None => log_to(Arc::clone(&output), log_file.is_none() && std::io::stderr().is_terminal(), verbose)?,
    }
    options.log = Some(output);
    let has_file = log_file.is_some();
    vmm::run(options).inspect_err(|error| {
        // Otherwise only the caller's terminal has it.
        if has_file {
            log::error!("{}", chain(error));
        }
    })?;
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

/// The output of the log: a file, or standard error.
fn log_output(file: Option<&Path>) -> Result<LogOutput, CommandError> {
    let fail = |path: &Path, error| CommandError::LogFile { path: path.to_owned(), error };
    file.map_or_else(|| Ok(LogOutput::stderr()), |path| LogOutput::file(path).map_err(|error| fail(path, error)))
}

/// Sends the log to `output` in this format.
fn log_as(format: Format, start: Instant, output: Arc<LogOutput>, verbose: u8) -> Result<(), CommandError> {
    let level = match verbose {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    log_format::start(format, level, start, output).map_err(|error| CommandError::Log(Box::new(error)))
}

/// Sends the log to `output`.
fn log_to(output: Arc<LogOutput>, is_terminal: bool, verbose: u8) -> Result<(), CommandError> {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    // Reporting its own write errors on a closed standard error would panic, and end the guest.
    let log = tracing_subscriber::fmt().with_max_level(level).log_internal_errors(false);
    log.with_ansi(is_terminal).with_writer(output).try_init().map_err(CommandError::Log)
}
