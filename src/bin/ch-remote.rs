//! The command `ch-remote`: controls a running cloud-hypervisor through its API.

#[path = "../remote/mod.rs"]
mod remote;
#[path = "../usage.rs"]
mod usage;
#[path = "../vm_options.rs"]
mod vm_options;

use std::error::Error;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::termios::tcgetwinsize;
use serde::de::DeserializeOwned;
use vm_api::config::{ConfigError, Problem};
use vm_api::info::{VmCounters, VmInfo};
use vm_api::migration::MigrationProgress;

use crate::remote::client::{Answer, Call, Client, ClientError, Patience};
use crate::remote::command::{Cli, Command, socket_of_environment};
use crate::remote::vf_table::{self, Choice};
use crate::remote::vfs::{Readings, Row, rows};
use crate::remote::{counters, request, show};

/// The exit code if the VMM refuses, or cannot be reached.
const FAILURE: u8 = 1;
/// The exit code if the command line is malformed.
const USAGE: u8 = 2;

/// Endpoint of the progress of a migration.
const PROGRESS: &str = "vm.migration-progress";
/// Time between two looks at a migration.
const LOOK: Duration = Duration::from_millis(200);

/// Error of a migration whose end the VMM did not report: it was stopped, or failed.
const UNKNOWN_END: &str = "send-migration: the VMM ended without a report; see whether the target has the guest \
                           (ch-remote info there) before you start it anywhere";

/// Clears the terminal, and moves the cursor to its upper left corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// An error in one line, or in JSON, and the exit code.
#[derive(Debug)]
struct Failed {
    text: String,
    code: u8,
}

impl Failed {
    /// An error of this program itself.
    fn new(error: impl std::fmt::Display) -> Self {
        Self { text: format!("ch-remote: {error}"), code: FAILURE }
    }

    /// An error of a command's arguments. Text that does not parse is one of usage.
    fn of_arguments(error: &(dyn Error + 'static)) -> Self {
        let is_usage =
            error.downcast_ref().is_some_and(|error: &ConfigError| matches!(error.problem, Problem::Syntax(_)));
        Self { code: if is_usage { USAGE } else { FAILURE }, ..Self::new(error) }
    }

    /// An error of the command line.
    fn of_usage(line: &str) -> Self {
        let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        Self { code: USAGE, ..Self::new(line) }
    }
}

fn main() -> ExitCode {
    let given: Vec<_> = std::env::args_os().skip(1).map(|given| given.to_string_lossy().into_owned()).collect();
    let done = match Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(error) => match usage::line(&error, &given) {
            Some(line) => Err(Failed::of_usage(&line)),
            None => {
                // Help or version. If printing fails, nothing is left to do.
                let _ = error.print();
                return if error.use_stderr() { USAGE.into() } else { ExitCode::SUCCESS };
            }
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed { text, code }) => {
            // Standard error may be closed.
            let _ = writeln!(stderr(), "{text}");
            code.into()
        }
    }
}

/// Output format of replies.
#[derive(Debug, Clone, Copy)]
struct Format {
    /// For people.
    text: bool,
    /// A failure, too, is JSON.
    json: bool,
}

fn run(cli: Cli) -> Result<(), Failed> {
    let format = Format { text: cli.text || (!cli.json && stdout().is_terminal()), json: cli.json };
    if let Command::Counters { explain: Some(name) } = &cli.command {
        return print(&counters::explain(name).map_err(Failed::new)?);
    }
    let socket = match cli.api_socket {
        Some(socket) => Some(socket),
        None => socket_of_environment().map_err(|line| Failed::of_usage(&line))?,
    };
    let missing = || Failed::of_usage("no API socket is named; give --api-socket, or set CH_API_SOCKET");
    let socket = socket.ok_or_else(missing)?;
    // Before the connection: a malformed command line is an error without a VMM, too.
    let prepared = |command| request::prepare(command).map_err(|error| Failed::of_arguments(&*error));
    let connect = || Client::connect(&socket, Patience::new(cli.timeout)).map_err(Failed::new);
    match cli.command {
        Command::Vfs { pf, indices, watch, interval } => {
            let mut remote = Remote { client: connect()?, format };
            remote.vfs(&Choice { pf, indices }, watch, Duration::from_secs(interval.into()))
        }
        command => {
            let shown = shown(&command);
            let waits = matches!(command, Command::SendMigration { wait: true, .. });
            let prepared = prepared(command)?;
            let mut remote = Remote { client: connect()?, format };
            if waits {
                // A VMM that exits first reports the end to a client that has asked for the progress shortly before.
                remote.client.call(&Call::new("GET", PROGRESS), &[]).map_err(Failed::new)?;
            }
            remote.once(prepared, shown)?;
            if waits { remote.wait_for_migration() } else { Ok(()) }
        }
    }
}

/// A function that formats an answer for people, if it has that form.
type Shown = fn(&str) -> Option<String>;

/// The format of the answer to a command.
fn shown(command: &Command) -> Shown {
    match command {
        Command::Info => |body| parse(body).map(|document| show::info(&document)),
        Command::Counters { .. } => |body| parse(body).map(|document| counters::values(&document)),
        Command::Add(_) | Command::Ping | Command::MigrationProgress => {
            |body| parse(body).map(|document| show::fields(&document))
        }
        _ => |_| None,
    }
}

/// The VMM, and the output format of its replies.
struct Remote {
    client: Client,
    format: Format,
}

impl Remote {
    fn once(&mut self, prepared: request::Prepared, shown: Shown) -> Result<(), Failed> {
        let request::Prepared { call, fds } = prepared;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let answer = self.client.call(&call, &fds).map_err(Failed::new)?;
        let body = self.succeeded(&call, answer)?;
        match shown(&body).filter(|_| self.format.text) {
            Some(text) => print(&text),
            None if body.is_empty() => Ok(()),
            None => print(&format!("{}\n", body.trim_end_matches('\n'))),
        }
    }

    /// Waits for the end of a migration that this VMM sends. The VMM reports the end before it exits.
    ///
    /// # Errors
    ///
    /// Fails if the target does not get the guest.
    fn wait_for_migration(&mut self) -> Result<(), Failed> {
        let call = Call::new("GET", PROGRESS);
        loop {
            let answer = match self.client.call(&call, &[]) {
                Err(ClientError::Lost(_)) => return Err(Failed::new(UNKNOWN_END)),
                answer => answer.map_err(Failed::new)?,
            };
            let progress: MigrationProgress = self.read(&call, answer)?;
            match progress.state.as_str() {
                "active" => sleep(LOOK),
                "finished" => return Ok(()),
                state => {
                    let why = progress.error.map(|error| format!(": {error}")).unwrap_or_default();
                    return Err(Failed::new(format!("send-migration: {state}{why}")));
                }
            }
        }
    }

    /// Shows the PFs and VFs with the rates between two readings; with `watch`, repeatedly.
    fn vfs(&mut self, choice: &Choice, watch: bool, interval: Duration) -> Result<(), Failed> {
        let (mut before, mut at) = (self.counters()?, Instant::now());
        loop {
            // Without a running VM there are no rates to wait for.
            if watch || before.is_some() {
                sleep(interval);
            }
            let (after, now) = (self.counters()?, Instant::now());
            let info: VmInfo = self.get("vm.info")?;
            let readings = before.zip(after.clone());
            let readings = readings.map(|(before, after)| Readings { before, after, between: now - at });
            let all = rows(&info, readings.as_ref());
            if choice.pf.is_some() && !all.iter().any(|row| choice.has(row)) {
                return Err(Failed::new(choice.missing(&info)));
            }
            let rows: Vec<_> = all.into_iter().filter(|row| choice.has(row)).collect();
            match self.format.text {
                true if watch && stdout().is_terminal() => print(&format!("{CLEAR}{}", for_terminal(&rows)))?,
                true => print(&vf_table::text(&rows))?,
                false => print(&format!("{}\n", serde_json::to_string(&rows).map_err(Failed::new)?))?,
            }
            if !watch {
                return Ok(());
            }
            (before, at) = (after, now);
        }
    }

    /// The counters, if the VM runs.
    fn counters(&mut self) -> Result<Option<VmCounters>, Failed> {
        let answer = self.client.call(&Call::new("GET", "vm.counters"), &[]).map_err(Failed::new)?;
        Ok(if answer.is_success() { parse(&answer.body) } else { None })
    }

    fn get<T: DeserializeOwned>(&mut self, endpoint: &str) -> Result<T, Failed> {
        let call = Call::new("GET", endpoint);
        let answer = self.client.call(&call, &[]).map_err(Failed::new)?;
        self.read(&call, answer)
    }

    /// Parses the body of a successful reply.
    fn read<T: DeserializeOwned>(&self, call: &Call, answer: Answer) -> Result<T, Failed> {
        let body = self.succeeded(call, answer)?;
        let unexpected =
            |error| format!("{}: unexpected answer: {error}; is the VMM of the same version?", call.endpoint());
        serde_json::from_str(&body).map_err(|error| Failed::new(unexpected(error)))
    }

    /// The body of a successful reply.
    fn succeeded(&self, call: &Call, answer: Answer) -> Result<String, Failed> {
        if answer.is_success() {
            return Ok(answer.body);
        }
        if self.format.json && !answer.body.is_empty() {
            return Err(Failed { text: answer.body, code: FAILURE });
        }
        let endpoint = call.endpoint();
        let chain = parse::<Vec<String>>(&answer.body).unwrap_or_else(|| vec![answer.body.clone()]);
        let chain: Vec<_> = chain.iter().map(|line| line.trim_start_matches(&format!("{endpoint}: "))).collect();
        Err(Failed::new(format!("{endpoint}: {} (status {})", chain.join(": "), answer.status)))
    }
}

/// Parses a document; `None` if it is another VMM's, in an unknown format.
fn parse<T: DeserializeOwned>(body: &str) -> Option<T> {
    serde_json::from_str(body).ok()
}

/// The table of PFs and VFs, cut to the size of the terminal.
fn for_terminal(rows: &[Row]) -> String {
    let text = vf_table::text(rows);
    match tcgetwinsize(stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => vf_table::fit(&text, size.ws_row.into(), size.ws_col.into()),
        _ => text,
    }
}

fn print(text: &str) -> Result<(), Failed> {
    let mut output = stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(Failed::new)
}
