//! The command `cloud-hypervisor`: from arguments to a VM and an exit code.

mod cli;
mod vm_options;

use std::error::Error;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use rustix::fs::Mode;
use tracing_subscriber::filter::LevelFilter;
use vmm::MonitorError;
use vmm::api::SocketError;
use vmm::config::{ConfigError, Problem, VmConfig, VmPlan};

use crate::cli::{Cli, Usage};

/// The exit code when something is wrong.
const FAILURE: u8 = 1;
/// The exit code when it is the command line's text.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    // What is created here is this user's alone.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&chain(error.as_ref()));
            ExitCode::from(code(error.as_ref()))
        }
    }
}

/// Runs until the VM ends.
fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let (verbose, log_file, print_config) = (cli.verbose, cli.log_file.clone(), cli.print_config);
    let options = cli.into_options()?;
    // Before the log file: a configuration that is wrong leaves nothing behind.
    let plan = options.vm.as_ref().map(VmConfig::plan).transpose()?;
    if let (true, Some(vm), Some(plan)) = (print_config, &options.vm, &plan) {
        return print(vm.clone(), plan);
    }
    log_to(log_file.as_deref(), verbose)?;
    vmm::run(options)?;
    Ok(())
}

/// Prints the VM, with what was left out filled in as `plan` decided.
fn print(mut vm: VmConfig, plan: &VmPlan) -> Result<(), Box<dyn Error>> {
    vm.payload.check_present()?;
    vm.resolve(plan);
    let mut output = std::io::stdout().lock();
    writeln!(output, "{}", serde_json::to_string_pretty(&vm)?)?;
    Ok(())
}

/// Answers a command line that describes no VM.
fn refuse(error: &clap::Error) -> ExitCode {
    match cli::report(error) {
        Some(line) => {
            say(&line);
            ExitCode::from(USAGE)
        }
        None => {
            // Help or version; there is nobody to tell if nobody reads it.
            let _ = error.print();
            if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
        }
    }
}

/// The exit code of an error: the text of an option that cannot be read is a part of the command line.
fn code(error: &(dyn Error + 'static)) -> u8 {
    let is_config = matches!(error.downcast_ref(), Some(ConfigError { problem: Problem::Syntax(_), .. }));
    let is_socket = matches!(error.downcast_ref(), Some(SocketError::Syntax(_)));
    let is_monitor = matches!(error.downcast_ref(), Some(MonitorError::Syntax(_)));
    let is_usage = error.is::<Usage>();
    if is_config || is_socket || is_monitor || is_usage { USAGE } else { FAILURE }
}

/// Reports an error in one line.
fn say(line: &str) {
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "cloud-hypervisor: {line}");
}

/// An error and its causes. A cause that the error tells itself is not repeated.
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

/// Sends the log to a file or to standard error.
fn log_to(file: Option<&Path>, verbose: u8) -> Result<(), Box<dyn Error>> {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    // It would tell of a line that it could not write on standard error, and a panic would end the guest if that is closed, too.
    let log = tracing_subscriber::fmt().with_max_level(level).log_internal_errors(false);
    let started = match file {
        Some(path) => {
            let file = File::create(path).map_err(|error| {
                format!("--log-file {}: cannot be written ({error}); give a path that can be", path.display())
            })?;
            log.with_ansi(false).with_writer(file).try_init()
        }
        None => log.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr).try_init(),
    };
    started.map_err(|error| -> Box<dyn Error> { error })
}
