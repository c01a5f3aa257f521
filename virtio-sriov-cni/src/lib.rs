//! CNI plugin that gives virtio VFs of a guest to its containers.
//!
//! It takes the configuration of sriov-cni. A VF's policy is set by the host, which is asked over the channel of
//! [`vfctl`]; its interface moves into the container by rtnetlink. `docs/reference/cni.md` has keys, codes and steps.
//!
//! ADD writes a record before its first change. DEL, GC and an ADD that fails undo it from that record alone
//! ([`release`]), so that a plugin that was killed at any step leaves nothing after them.

mod add;
mod announce;
mod check;
pub mod config;
pub mod device;
pub mod error;
pub mod governor;
mod ipam;
mod log;
pub mod namespace;
pub mod net;
pub mod netlink;
pub mod parameters;
mod release;
pub mod result;
pub mod settings;
pub mod state;
pub mod system;
mod transfer;
pub mod version;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::log::{Level, Log};
use crate::namespace::Namespace;
use crate::parameters::{Command, Environment};
use crate::system::{Run, System};
use crate::version::Version;

/// Runs one command: reads `input`, works on `system`, and returns standard output and the exit code.
pub fn run(system: &System<'_>, environment: &Environment, input: &[u8]) -> (String, u8) {
    match execute(system, environment, input) {
        Ok(output) => (output, 0),
        Err(error) => {
            // As far as it can be read.
            let keys = config::keys(input).ok();
            let version = keys.and_then(|keys| Version::parse(keys.text("cniVersion").ok()??));
            (error.to_json(version.unwrap_or(Version::NEWEST).as_str()), 1)
        }
    }
}

fn execute(system: &System<'_>, environment: &Environment, input: &[u8]) -> Result<String> {
    let command = environment.command()?;
    if command == Command::Version {
        let keys = config::keys(input)?;
        return Ok(version::supported(keys.text("cniVersion")?.unwrap_or("0.1.0")));
    }
    let config = Config::read(input)?;
    let variable = |name: &str| environment.0.get(name).map(String::as_str).unwrap_or_default();
    let about = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_IFNAME"].map(variable).join(" ");
    let log = Log { level: config.level, file: config.log.clone(), about: format!("{about} {}", config.name) };
    for key in config.unknown() {
        log.warn(&format!("{key}: this plugin does not know this key"));
    }
    for key in environment.unknown_arguments() {
        log.warn(&format!("CNI_ARGS {key}: this plugin does not know this key; IgnoreUnknown=1 says that others do"));
    }
    let host = Namespace::current().map_err(|error| Error::io("opening the host's namespace", &error))?;
    let run = Run { system, environment, config, input, log, host };
    let result = dispatch(&run, command);
    match &result {
        Ok(_) => run.log.write(Level::Info, "done"),
        Err(error) => run.log.write(Level::Error, &error.message),
    }
    result
}

fn dispatch(run: &Run<'_>, command: Command) -> Result<String> {
    let version = run.config.version;
    let nothing = |()| String::new();
    match command {
        Command::Add => add::add(run),
        Command::Del => release::del(run).map(nothing),
        Command::Check => {
            version.needs("CHECK", Version::V0_4_0)?;
            check::check(run).map(nothing)
        }
        Command::Status => {
            version.needs("STATUS", Version::V1_1_0)?;
            check::status(run).map(nothing)
        }
        Command::Gc => {
            version.needs("GC", Version::V1_1_0)?;
            release::gc(run).map(nothing)
        }
        Command::Version => Ok(String::new()),
    }
}
