//! The arguments of `ch-remote set-vf`.

use std::path::PathBuf;

use clap::builder::PossibleValue;
use clap::error::ErrorKind;
use clap::{Arg, ArgGroup, ArgMatches, Args, Command, Error, FromArgMatches, Id};
use vm_api::body::SetVf;
use vm_api::config::{Argument, Form, VfRange};

/// Name of the group of all arguments, of which at least one is required.
const GROUP: &str = "VfChange";

/// Changes of a VF: an argument for each setting of a request that has one.
#[derive(Debug)]
pub(crate) struct VfChange(SetVf);

impl VfChange {
    /// The body of the request.
    pub(crate) fn into_body(self, pf: String, index: Option<VfRange>) -> SetVf {
        SetVf { pf, index, ..self.0 }
    }
}

impl Args for VfChange {
    fn group_id() -> Option<Id> {
        Some(Id::from(GROUP))
    }

    fn augment_args(command: Command) -> Command {
        let names = SetVf::arguments().map(|argument| argument.name);
        let group = ArgGroup::new(GROUP).args(names.collect::<Vec<_>>()).required(true).multiple(true);
        command.group(group).args(SetVf::arguments().map(described))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for VfChange {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut change = Self(SetVf::default());
        change.update_from_arg_matches(matches)?;
        Ok(change)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for argument in SetVf::arguments() {
            let Some(text) = given(&argument, matches) else { continue };
            let text = text.ok_or_else(|| Error::new(ErrorKind::InvalidUtf8))?;
            self.0.set_argument(argument.name, &text).map_err(|what| Error::raw(ErrorKind::ValueValidation, what))?;
        }
        Ok(())
    }
}

/// Description of `argument` for clap, which checks the value.
fn described(argument: Argument) -> Arg {
    let Argument { name, long, value_name, about, form } = argument;
    let arg = Arg::new(name).long(long).value_name(value_name).help(about);
    match form {
        Form::Path => arg.value_parser(clap::value_parser!(PathBuf)),
        Form::Words(words) => {
            let words = words.iter().map(|(word, about)| match about.is_empty() {
                true => PossibleValue::new(*word),
                false => PossibleValue::new(*word).help(*about),
            });
            arg.value_parser(words.collect::<Vec<_>>())
        }
        Form::Number(_) | Form::Text => {
            arg.value_parser(move |text: &str| SetVf::default().set_argument(name, text).map(|()| text.to_string()))
        }
    }
}

/// Text of the argument's value, if it is given; `None` inside if it is not UTF-8.
fn given(argument: &Argument, matches: &ArgMatches) -> Option<Option<String>> {
    let name = argument.name;
    match argument.form {
        Form::Path => matches.get_one::<PathBuf>(name).map(|path| path.to_str().map(str::to_string)),
        Form::Words(_) | Form::Number(_) | Form::Text => matches.get_one::<String>(name).cloned().map(Some),
    }
}
