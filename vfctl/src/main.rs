//! The command `vfctl`: governs the VFs of a guest from within.

mod command;
mod settings;
mod table;
#[path = "../../src/usage.rs"]
mod usage;
mod view;

use std::io::{IsTerminal, Write, stderr, stdout};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use serde::Serialize;
use vfctl::function::Function;
use vfctl::{Channel, Error, Events, Roots};
use vm_api::channel::{Notice, PfState, VfState};

use crate::command::{Cli, Command};
use crate::view::{PfView, VfView};

/// The exit code if the host refuses, or there is no such function.
const FAILURE: u8 = 1;
/// The exit code if the command line is malformed.
const USAGE: u8 = 2;

/// An error in one line, and the exit code.
#[derive(Debug)]
struct Failed {
    line: String,
    code: u8,
}

impl Failed {
    fn new(line: impl std::fmt::Display) -> Self {
        Self { line: line.to_string(), code: FAILURE }
    }

    fn of_usage(line: impl std::fmt::Display) -> Self {
        Self { code: USAGE, ..Self::new(line) }
    }

    /// An error of a request about the function that the user called `name`.
    fn about(name: &str, error: Error) -> Self {
        match error {
            Error::Refused(refusal) => Self::new(format!("{name}: {}", refusal.message)),
            error => error.into(),
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::NoChannel { .. } | Error::NoNode(_) => 3,
            Error::NoPermission(_) => 4,
            Error::Busy(_) => 5,
            Error::NoAnswer { .. } => 6,
            Error::Refused(_) | Error::Unexpected(_) | Error::Io { .. } => FAILURE,
        };
        Self { code, ..Self::new(error) }
    }
}

fn main() -> ExitCode {
    let given: Vec<_> = std::env::args_os().skip(1).map(|given| given.to_string_lossy().into_owned()).collect();
    let done = match Cli::try_parse() {
        Ok(cli) => Guest::new(&cli).run(cli.command),
        Err(error) => match usage::line(&error, &given) {
            Some(line) => Err(Failed::of_usage(line)),
            None => {
                // Help or version. If printing fails, nothing is left to do.
                let _ = error.print();
                return if error.use_stderr() { USAGE.into() } else { ExitCode::SUCCESS };
            }
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed { line, code }) => {
            let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            // Standard error may be closed.
            let _ = writeln!(stderr(), "vfctl: {line}");
            code.into()
        }
    }
}

/// The guest that the program runs in, and its output format.
struct Guest {
    roots: Roots,
    limit: Duration,
    /// Tables instead of JSON.
    text: bool,
}

impl Guest {
    fn new(cli: &Cli) -> Self {
        let text = cli.text || (!cli.json && stdout().is_terminal());
        Self { roots: Roots::below(&cli.root), limit: cli.timeout, text }
    }

    fn run(&self, command: Command) -> Result<(), Failed> {
        match command {
            Command::List { pf } => self.list(pf.as_deref()),
            Command::Show { vf } => {
                let address = self.vf(&vf)?;
                let state = self.channel()?.get(&address).map_err(|error| Failed::about(&vf, error))?;
                self.print(&VfView::new(&self.roots, state), table::of_vf)
            }
            Command::Set { vf, settings } => {
                // A malformed setting is an error of the command line, whatever the VF.
                let mut set = settings::parse("", &settings).map_err(Failed::of_usage)?;
                set.vf = self.vf(&vf)?;
                let state = self.channel()?.set(&set).map_err(|error| Failed::about(&vf, error))?;
                self.print_one(state)
            }
            Command::Reset { vf: Some(vf), .. } => {
                let address = self.vf(&vf)?;
                let state = self.channel()?.reset(&address).map_err(|error| Failed::about(&vf, error))?;
                self.print_one(state)
            }
            Command::Reset { vf: None, .. } => self.reset_all(),
            Command::Watch => self.watch(),
        }
    }

    fn channel(&self) -> Result<Channel, Failed> {
        Ok(Channel::open_in(&self.roots, self.limit)?)
    }

    fn list(&self, pf: Option<&str>) -> Result<(), Failed> {
        let address = pf.map(|name| self.function(name)).transpose()?.map(|pf| pf.address().to_owned());
        let mut channel = self.channel()?;
        let all = channel.hello()?.pfs;
        if let (Some(name), Some(address)) = (pf, &address)
            && !all.iter().any(|pf| pf.pf == *address)
        {
            return Err(Failed::new(not_governed(name, &all)));
        }
        let mut views = Vec::new();
        for pf in all.into_iter().filter(|pf| address.as_ref().is_none_or(|address| pf.pf == *address)) {
            let vfs = channel.list(&pf.pf)?;
            views.push(PfView::new(&self.roots, pf, vfs));
        }
        self.print(&views, |views| table::of_pfs(views))
    }

    fn reset_all(&self) -> Result<(), Failed> {
        let mut channel = self.channel()?;
        let mut states = Vec::new();
        for pf in channel.hello()?.pfs {
            for vf in channel.list(&pf.pf)?.into_iter().filter(|vf| !vf.set.is_empty()) {
                states.push(channel.reset(&vf.vf).map_err(|error| Failed::about(&vf.vf, error))?);
            }
        }
        let views: Vec<_> = states.into_iter().map(|state| VfView::new(&self.roots, state)).collect();
        self.print(&views, |views| match views.as_slice() {
            [] => "no VF has settings of the guest\n".to_string(),
            views => table::of_vfs(views),
        })
    }

    fn watch(&self) -> Result<(), Failed> {
        let mut events = Events::open_in(&self.roots, self.limit)?;
        loop {
            let notice = events.next_notice()?;
            self.print(&notice, |Notice { vf, by, changed }| {
                let netdev = Function::at(&self.roots, vf).and_then(|function| function.netdev());
                let netdev = netdev.map(|netdev| format!(" ({netdev})")).unwrap_or_default();
                format!("{vf}{netdev} by {by}: {changed}\n")
            })?;
        }
    }

    /// The function that the user calls `name`.
    fn function(&self, name: &str) -> Result<Function, Failed> {
        Function::find(&self.roots, name).ok_or_else(|| {
            Failed::new(format!(
                "{name}: there is no such function; give a PCI address, a network interface of this network \
                 namespace, or PF/INDEX of a VF that is enabled; see vfctl list"
            ))
        })
    }

    /// PCI address of the VF that the user calls `name`.
    fn vf(&self, name: &str) -> Result<String, Failed> {
        let function = self.function(name)?;
        match function.pf() {
            Some(_) => Ok(function.address().to_owned()),
            None => Err(Failed::new(format!("{name}: not a VF; name a VF of it, such as {name}/0"))),
        }
    }

    /// Prints a VF after a change.
    fn print_one(&self, state: VfState) -> Result<(), Failed> {
        self.print(&VfView::new(&self.roots, state), |view| table::of_vfs(std::slice::from_ref(view)))
    }

    fn print<T: Serialize>(&self, value: &T, text: impl FnOnce(&T) -> String) -> Result<(), Failed> {
        let text = match self.text {
            true => text(value),
            false => serde_json::to_string(value).map_err(Failed::new)? + "\n",
        };
        let mut output = stdout().lock();
        output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(Failed::new)
    }
}

/// The error of a PF that the guest may not govern.
fn not_governed(name: &str, all: &[PfState]) -> String {
    let others: Vec<_> = all.iter().map(|pf| pf.pf.as_str()).collect();
    let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
    format!("{name}: the host does not let this guest govern its VFs, only those of: {others}")
}
