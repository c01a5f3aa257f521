//! Rules of filters: a system call, and which arguments it may have.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use libc::c_long;
use seccompiler::{
    BackendError, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Condition, SeccompRule,
};

/// Rules that belong together, and what they are for.
#[derive(Debug)]
pub(super) struct Group {
    /// What needs them.
    pub why: &'static str,
    /// The rules.
    pub rules: &'static [Rule],
}

/// A system call that is allowed. Several rules about one call allow what any of them allows.
#[derive(Debug)]
pub(super) struct Rule {
    /// Its number.
    pub call: c_long,
    /// With which arguments.
    pub only: Only,
}

/// The arguments that a call may have.
#[derive(Debug)]
pub(super) enum Only {
    /// Any.
    Any,
    /// The 32 bits of this argument, counted from 0, have one of these values.
    OneOf(u8, &'static [u64]),
    /// The 32 bits of each of these arguments have this value.
    All(&'static [(u8, u64)]),
    /// This argument has none of these bits.
    Without(u8, u64),
    /// This argument has all of these bits.
    With(u8, u64),
    /// This argument is the number of this process.
    ThisProcess(u8),
}

/// This call with any arguments.
pub(super) const fn any(call: c_long) -> Rule {
    Rule { call, only: Only::Any }
}

/// This call with these arguments.
pub(super) const fn only(call: c_long, only: Only) -> Rule {
    Rule { call, only }
}

/// What a filter allows, as the library takes it.
pub(super) type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

impl Rule {
    /// It in the library's terms: one of these has to hold; none, if any arguments will do.
    fn alternatives(&self) -> Result<Vec<SeccompRule>, BackendError> {
        let is = |(argument, value): (u8, u64)| Condition::new(argument, Len::Dword, Op::Eq, value);
        let masked = |argument, bits, value| Condition::new(argument, Len::Qword, Op::MaskedEq(bits), value);
        let one = |condition| SeccompRule::new(vec![condition]);
        match self.only {
            Only::Any => Ok(Vec::new()),
            Only::OneOf(argument, values) => values.iter().map(|value| one(is((argument, *value))?)).collect(),
            Only::All(arguments) => {
                Ok(vec![SeccompRule::new(arguments.iter().copied().map(is).collect::<Result<_, _>>()?)?])
            }
            Only::Without(argument, bits) => Ok(vec![one(masked(argument, bits, 0)?)?]),
            Only::With(argument, bits) => Ok(vec![one(masked(argument, bits, bits)?)?]),
            Only::ThisProcess(argument) => Ok(vec![one(is((argument, std::process::id().into()))?)?]),
        }
    }
}

/// The rules of a filter that allows what these groups allow.
///
/// # Errors
///
/// The library refuses a rule, which is a mistake in a list.
pub(super) fn rules<'g>(groups: impl IntoIterator<Item = &'g Group>) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    for rule in groups.into_iter().flat_map(|group| group.rules) {
        let new = rule.alternatives()?;
        match rules.entry(rule.call) {
            Entry::Vacant(entry) => _ = entry.insert(new),
            Entry::Occupied(mut entry) if new.is_empty() || entry.get().is_empty() => entry.get_mut().clear(),
            Entry::Occupied(mut entry) => {
                for alternative in new {
                    if !entry.get().contains(&alternative) {
                        entry.get_mut().push(alternative);
                    }
                }
            }
        }
    }
    Ok(rules)
}
