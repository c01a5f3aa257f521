//! Rules of filters: a system call, and the arguments that it may have.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use libc::c_long;
use seccompiler::{
    BackendError, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Condition, SeccompRule,
};

/// Rules that belong together, with their use.
#[derive(Debug)]
pub(super) struct Group {
    /// Use of these calls.
    pub why: &'static str,
    /// The rules.
    pub rules: &'static [Rule],
}

/// An allowed system call. Several rules about one call allow what any of them allows.
#[derive(Debug)]
pub(super) struct Rule {
    /// Number of the call.
    pub call: c_long,
    /// Constraints on its arguments, which all must hold.
    pub arguments: [Argument; MOST],
}

/// The most arguments of a call that a rule constrains.
const MOST: usize = 4;

/// An argument of a call, with its allowed values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Argument {
    /// Place of the argument, from 0.
    pub place: u8,
    /// Allowed values.
    pub is: Is,
}

/// The values that an argument may have.
#[derive(Debug, Clone, Copy)]
pub(super) enum Is {
    /// Any.
    Any,
    /// Any of these values, in the low 32 bits.
    OneOf(&'static [u64]),
    /// In the bits of `mask`, this value.
    Bits {
        /// The bits that matter.
        mask: u64,
        /// Their value.
        value: u64,
    },
    /// 0, with which a call refers to its caller, or the number of this process, for an argument that is the number of
    /// a process or a thread: neither refers to another process.
    ThisProcess,
}

/// This call with any arguments.
pub(super) const fn any(call: c_long) -> Rule {
    Rule { call, arguments: [Argument { place: 0, is: Is::Any }; MOST] }
}

/// This call with arguments that satisfy all of these.
pub(super) const fn only<const N: usize>(call: c_long, arguments: [Argument; N]) -> Rule {
    let mut rule = any(call);
    let mut at = 0;
    while at < N {
        // More constraints than there is room for do not compile.
        rule.arguments[at] = arguments[at];
        at += 1;
    }
    rule
}

/// The argument at this place is one of `values`.
pub(super) const fn one_of(place: u8, values: &'static [u64]) -> Argument {
    Argument { place, is: Is::OneOf(values) }
}

/// The argument at this place has `value` in the bits of `mask`.
pub(super) const fn bits(place: u8, mask: u64, value: u64) -> Argument {
    Argument { place, is: Is::Bits { mask, value } }
}

/// The argument at this place has none of these bits.
pub(super) const fn without(place: u8, mask: u64) -> Argument {
    bits(place, mask, 0)
}

/// The argument at this place has all of these bits.
pub(super) const fn with(place: u8, mask: u64) -> Argument {
    bits(place, mask, mask)
}

/// The argument at this place is the number of a process or a thread: 0 or this process.
pub(super) const fn this_process(place: u8) -> Argument {
    Argument { place, is: Is::ThisProcess }
}

impl Argument {
    /// The argument in the library's terms: one of these conditions must hold.
    fn alternatives(&self) -> Result<Vec<Condition>, BackendError> {
        let equal = |value: u64| Condition::new(self.place, Len::Dword, Op::Eq, value);
        match self.is {
            Is::Any => Ok(Vec::new()),
            Is::OneOf(values) => values.iter().map(|value| equal(*value)).collect(),
            Is::Bits { mask, value } => Ok(vec![Condition::new(self.place, Len::Qword, Op::MaskedEq(mask), value)?]),
            Is::ThisProcess => [0, std::process::id().into()].into_iter().map(equal).collect(),
        }
    }
}

/// Rules of a filter, in the library's form.
pub(super) type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

impl Rule {
    /// The rule in the library's terms: one of these must hold; empty if any arguments are allowed.
    fn alternatives(&self) -> Result<Vec<SeccompRule>, BackendError> {
        let mut alternatives = vec![Vec::new()];
        for argument in self.arguments.iter().filter(|argument| !matches!(argument.is, Is::Any)) {
            let conditions = argument.alternatives()?;
            let with = |so_far: &Vec<Condition>| -> Vec<Vec<Condition>> {
                let with = |condition: &Condition| [so_far.as_slice(), std::slice::from_ref(condition)].concat();
                conditions.iter().map(with).collect()
            };
            alternatives = alternatives.iter().flat_map(with).collect();
        }
        alternatives.into_iter().filter(|conditions| !conditions.is_empty()).map(SeccompRule::new).collect()
    }
}

/// The rules of a filter that allows the calls of these groups.
///
/// # Errors
///
/// Fails if the library refuses a rule, which is a mistake in a list.
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
