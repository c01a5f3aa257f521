//! The commands that add a device, and their calls.

use std::error::Error;
use std::os::fd::OwnedFd;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches, Subcommand};
use vm_api::config::kinds::{KINDS, Kind};
use vm_api::config::{ConfigError, NetConfig, Options as _, Problem, VfConfig};

use super::descriptor::duplicate;
use crate::vm_options::keys;

/// The command for a vfio-user device, which is not supported yet.
const USER_DEVICE: &str = "add-user-device";
const VALUE: &str = "key=value,...";
const VF: &str = "vf";

/// Command that adds a device.
#[derive(Debug)]
pub(crate) enum Add {
    Device {
        kind: &'static Kind,
        /// The description, as in an option of the VMM.
        text: String,
        /// Overrides of a PF's defaults.
        vfs: Vec<String>,
    },
    UserDevice,
}

/// The commands of all kinds, in the order of the help.
fn commands() -> Vec<Command> {
    let mut commands: Vec<_> = KINDS.iter().map(command).collect();
    let config = Arg::new("config").value_name(VALUE).required(true).help("As for Cloud Hypervisor's ch-remote");
    commands.push(Command::new(USER_DEVICE).about("Add a vfio-user device (not supported yet)").arg(config));
    commands.sort_by(|a, b| a.get_name().cmp(b.get_name()));
    commands
}

fn command(kind: &Kind) -> Command {
    let Kind { option, texts, more, keys: of_device, .. } = kind;
    let about = format!("{}, as for {option} of cloud-hypervisor{more}\n\n{}", texts.argument_help, of_device());
    let argument = Arg::new(texts.argument).value_name(VALUE).required(true);
    let argument = argument.help(texts.argument_help).long_help(about);
    let command = Command::new(texts.command_name()).about(texts.command).arg(argument);
    if *option == NetConfig::OPTION { command.arg(vf()) } else { command }
}

fn vf() -> Arg {
    let about = "Overrides of the PF's defaults for one VF. Repeat for more";
    let arg = Arg::new(VF).long(VF).value_name(VALUE).action(ArgAction::Append);
    arg.help(about).long_help(keys::<VfConfig>(about))
}

impl FromArgMatches for Add {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let missing = || clap::Error::new(ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        let Some(kind) = KINDS.iter().find(|kind| kind.texts.command_name() == name) else {
            return Ok(Self::UserDevice);
        };
        let text = matches.get_one::<String>(kind.texts.argument).cloned().unwrap_or_default();
        let vfs = matches.try_get_many(VF).ok().flatten().unwrap_or_default().cloned().collect();
        Ok(Self::Device { kind, text, vfs })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for Add {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(commands())
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        name == USER_DEVICE || KINDS.iter().any(|kind| kind.texts.command_name() == name)
    }
}

/// The body of a call, if it has one, and copies of the named descriptors.
pub(crate) type Content = (Option<String>, Vec<OwnedFd>);

impl Add {
    /// Name of the command's endpoint.
    pub(crate) fn endpoint(&self) -> &'static str {
        match self {
            Self::Device { kind, .. } => kind.texts.endpoint(),
            Self::UserDevice => "vm.add-user-device",
        }
    }

    /// The content of the command's call. A device that is not supported has none, because the VMM always refuses it.
    ///
    /// # Errors
    ///
    /// Fails if the description is malformed, or a descriptor is not open.
    pub(crate) fn content(self) -> Result<Content, Box<dyn Error>> {
        let Self::Device { kind, text, vfs } = self else { return Ok((None, Vec::new())) };
        let (body, fds) = (kind.to_json)(&text)?;
        let fds = fds.into_iter().map(duplicate).collect::<Result<_, _>>()?;
        let body = if vfs.is_empty() { body } else { with_vfs(&body, &vfs)? };
        Ok((Some(body), fds))
    }
}

/// The body of a PF with these VFs.
fn with_vfs(body: &str, vfs: &[String]) -> Result<String, Box<dyn Error>> {
    let mut net: NetConfig = serde_json::from_str(body)?;
    for vf in vfs {
        net.vfs.push(vf.parse().map_err(of_argument)?);
    }
    Ok(serde_json::to_string(&net)?)
}

/// An error of `--vf`, which has the keys of the VMM's `--net-vf`.
fn of_argument(error: ConfigError) -> ConfigError {
    let named = |text: String| text.replace(VfConfig::OPTION, "--vf");
    let problem = match error.problem {
        Problem::Syntax(what) => Problem::Syntax(named(what)),
        problem => problem,
    };
    ConfigError { subject: named(error.subject), problem }
}
