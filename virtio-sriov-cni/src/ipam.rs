//! The IPAM plugin, to which addresses are delegated (`CNI 1.1.0, Section 4`).

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::error::{Code, Error, Result};
use crate::parameters::Environment;
use crate::result::Attached;

/// Commands without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Release the addresses of an attachment.
    Del,
    /// Check the addresses of an attachment.
    Check,
    /// Release the addresses of attachments that are not valid.
    Gc,
    /// Report if addresses are left.
    Status,
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }
}

/// An error of another plugin.
#[derive(Deserialize)]
struct Failure {
    code: u32,
    msg: String,
    #[serde(default)]
    details: String,
}

/// Asks a plugin for addresses.
///
/// # Errors
///
/// Errors of the plugin, and [`Code::Ipam`] if it cannot run or its answer is wrong.
pub(crate) fn add(plugin: &str, environment: &Environment, input: &[u8]) -> Result<Attached> {
    let output = run(plugin, "ADD", environment, input)?;
    let attached = serde_json::from_slice::<Attached>(&output);
    let attached = attached.map_err(|error| Error::new(Code::Ipam, format!("ipam.type={plugin}: {error}")))?;
    if attached.ips.is_empty() {
        return Err(Error::new(Code::Ipam, format!("ipam.type={plugin}: the plugin gave no address")));
    }
    Ok(attached)
}

/// Runs another command of a plugin.
///
/// # Errors
///
/// As [`add`].
pub(crate) fn order(plugin: &str, order: Order, environment: &Environment, input: &[u8]) -> Result<()> {
    run(plugin, order.name(), environment, input).map(|_| ())
}

/// Runs a plugin, with the same environment except for the command, and the same input.
fn run(plugin: &str, command: &str, environment: &Environment, input: &[u8]) -> Result<Vec<u8>> {
    let failed = |why: String| Error::new(Code::Ipam, format!("ipam.type={plugin}: {why}"));
    let path = find(plugin, environment)?;
    let mut child = Command::new(path);
    let variables: BTreeMap<_, _> = environment.0.iter().filter(|(name, _)| name.as_str() != "CNI_COMMAND").collect();
    child.env_clear().envs(variables).env("CNI_COMMAND", command);
    let spawned = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
    let mut child = spawned.map_err(|error| failed(error.to_string()))?;
    if let Some(mut stdin) = child.stdin.take() {
        match stdin.write_all(input) {
            // A plugin need not read all.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => return Err(failed(error.to_string())),
            _ => {}
        }
    }
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(match serde_json::from_slice::<Failure>(&output.stdout) {
        Ok(failure) => {
            let message = format!("ipam.type={plugin}: {}", failure.msg);
            Error { code: failure.code, message, details: failure.details }
        }
        Err(_) => failed(format!("{command} failed with {}", output.status)),
    })
}

/// The executable of a plugin.
///
/// # Errors
///
/// [`Code::Ipam`] if there is none, and [`Code::Environment`].
pub(crate) fn find(plugin: &str, environment: &Environment) -> Result<PathBuf> {
    let paths = environment.plugin_folders()?.into_iter().map(|folder| folder.join(plugin));
    let why = "no such plugin in the folders of CNI_PATH; install it there";
    let refusal = || Error::new(Code::Ipam, format!("ipam.type={plugin}: {why}"));
    paths.into_iter().find(|path| path.is_file()).ok_or_else(refusal)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn plugin(folder: &std::path::Path, script: &str) -> Environment {
        // Written by another process: a file that this one had open for writing could not be executed while a child
        // of another test still has it.
        let write = r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#;
        let path = folder.join("ipam");
        assert!(Command::new("sh").args(["-c", write, "sh", script]).arg(&path).status().unwrap().success());
        let variables = [
            ("CNI_PATH", format!("/missing:{}", folder.display())),
            ("CNI_COMMAND", "ADD".into()),
            ("CNI_IFNAME", "net1".into()),
        ];
        Environment(variables.map(|(name, value)| (name.to_string(), value)).into())
    }

    #[test]
    fn a_plugin_has_the_same_environment_and_input() {
        let folder = tempfile::tempdir().unwrap();
        let seen = folder.path().join("seen");
        let script = format!("echo $CNI_COMMAND $CNI_IFNAME > {0}; cat >> {0}", seen.display());
        let environment = plugin(folder.path(), &script);
        order("ipam", Order::Check, &environment, b"{\"a\":1}").unwrap();
        assert_eq!(fs::read_to_string(seen).unwrap(), "CHECK net1\n{\"a\":1}");
    }

    #[test]
    fn a_plugins_error_is_passed_on_with_its_code() {
        let folder = tempfile::tempdir().unwrap();
        let script = r#"echo '{"code": 11, "msg": "no address is free", "details": "a"}'; exit 1"#;
        let error = add("ipam", &plugin(folder.path(), script), b"{}").unwrap_err();
        let expected = Error::new(Code::TryAgain, "ipam.type=ipam: no address is free");
        assert_eq!(error, Error { details: "a".into(), ..expected });
    }

    #[test]
    fn a_plugin_that_is_missing_or_wrong_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let environment = plugin(folder.path(), "echo '{}'");
        for (name, why) in [("other", "no such plugin"), ("ipam", "gave no address")] {
            let error = add(name, &environment, b"{}").unwrap_err();
            assert!(error.is(Code::Ipam) && error.message.contains(why), "{error}");
        }
        let environment = plugin(folder.path(), "echo no; exit 3");
        assert!(order("ipam", Order::Del, &environment, b"{}").unwrap_err().message.contains("exit status: 3"));
    }
}
