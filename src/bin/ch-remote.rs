//! The command `ch-remote`: controls a running cloud-hypervisor through its API.

#[path = "../remote/mod.rs"]
mod remote;
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
use vm_api::info::{VmCounters, VmInfo};

use crate::remote::client::{Answer, Call, Client};
use crate::remote::command::{Cli, Command};
use crate::remote::vf_table::{self, Choice};
use crate::remote::vfs::{Readings, Row, rows};
use crate::remote::{counters, request, show};

/// The exit code if the VMM refuses, or cannot be reached.
const FAILURE: u8 = 1;

/// Clears the terminal, and moves the cursor to its upper left corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed.
            let _ = writeln!(stderr(), "{error}");
            ExitCode::from(FAILURE)
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

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let format = Format { text: cli.text || (!cli.json && stdout().is_terminal()), json: cli.json };
    if let Command::Counters { explain: Some(name) } = &cli.command {
        return print(&counters::explain(name).map_err(named)?);
    }
    let mut remote = Remote { client: Client::connect(&cli.api_socket).map_err(named)?, format };
    match cli.command {
        Command::Vfs { pf, indices, watch, interval } => {
            remote.vfs(&Choice { pf, indices }, watch, Duration::from_secs(interval.into()))
        }
        command => remote.once(command),
    }
}

/// An error of this program itself.
fn named(error: impl Into<Box<dyn Error>>) -> Box<dyn Error> {
    format!("ch-remote: {}", error.into()).into()
}

/// The VMM, and the output format of its replies.
struct Remote {
    client: Client,
    format: Format,
}

impl Remote {
    fn once(&mut self, command: Command) -> Result<(), Box<dyn Error>> {
        let shown: fn(&str) -> Option<String> = match command {
            Command::Info => |body| parse(body).map(|document| show::info(&document)),
            Command::Counters { .. } => |body| parse(body).map(|document| counters::values(&document)),
            _ => |_| None,
        };
        let request::Prepared { call, fds } = request::prepare(command).map_err(named)?;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let answer = self.client.call(&call, &fds).map_err(named)?;
        let body = self.succeeded(&call, answer)?;
        match shown(&body).filter(|_| self.format.text) {
            Some(text) => print(&text),
            None if body.is_empty() => Ok(()),
            None => print(&format!("{}\n", body.trim_end_matches('\n'))),
        }
    }

    /// Shows the PFs and VFs with the rates between two readings; with `watch`, repeatedly.
    fn vfs(&mut self, choice: &Choice, watch: bool, interval: Duration) -> Result<(), Box<dyn Error>> {
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
                return Err(named("vfs: there is no such PF or VF; vfs without arguments shows all"));
            }
            let rows: Vec<_> = all.into_iter().filter(|row| choice.has(row)).collect();
            match self.format.text {
                true if watch && stdout().is_terminal() => print(&format!("{CLEAR}{}", for_terminal(&rows)))?,
                true => print(&vf_table::text(&rows))?,
                false => print(&format!("{}\n", serde_json::to_string(&rows)?))?,
            }
            if !watch {
                return Ok(());
            }
            (before, at) = (after, now);
        }
    }

    /// The counters, if the VM runs.
    fn counters(&mut self) -> Result<Option<VmCounters>, Box<dyn Error>> {
        let answer = self.client.call(&Call::new("GET", "vm.counters"), &[]).map_err(named)?;
        Ok(if answer.is_success() { parse(&answer.body) } else { None })
    }

    fn get<T: DeserializeOwned>(&mut self, endpoint: &str) -> Result<T, Box<dyn Error>> {
        let call = Call::new("GET", endpoint);
        let answer = self.client.call(&call, &[]).map_err(named)?;
        let body = self.succeeded(&call, answer)?;
        serde_json::from_str(&body)
            .map_err(|error| named(format!("{endpoint}: unexpected answer: {error}; is the VMM of the same version?")))
    }

    /// The body of a successful reply.
    fn succeeded(&self, call: &Call, answer: Answer) -> Result<String, Box<dyn Error>> {
        if answer.is_success() {
            return Ok(answer.body);
        }
        if self.format.json && !answer.body.is_empty() {
            return Err(answer.body.into());
        }
        let endpoint = call.path.rsplit('/').next().unwrap_or_default();
        let chain = parse::<Vec<String>>(&answer.body).unwrap_or_else(|| vec![answer.body.clone()]);
        let chain: Vec<_> = chain.iter().map(|line| line.trim_start_matches(&format!("{endpoint}: "))).collect();
        Err(named(format!("{endpoint}: {} (status {})", chain.join(": "), answer.status)))
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

fn print(text: &str) -> Result<(), Box<dyn Error>> {
    let mut output = stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(named)
}
