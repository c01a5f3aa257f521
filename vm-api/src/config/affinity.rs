//! CPU affinity of numbered threads: `[0@[0-3],1@[2,5]]`.

use crate::config::grammar::list;
use crate::config::value::Value;

/// Parses a list: each number with its CPUs.
///
/// # Errors
///
/// Fails with the fault of the first entry that cannot be read.
pub(crate) fn parse<N: Value>(text: &str) -> Result<Vec<(N, Vec<u32>)>, String> {
    let element = |element: &String| {
        let (number, cpus) = element.split_once('@').ok_or("write each as 0@[0,2-3]: a number, @, its CPUs")?;
        let cpus = Vec::<i32>::parse(cpus)?.into_iter().map(i32::unsigned_abs).collect();
        Ok((N::parse(number)?, cpus))
    };
    list(text)?.iter().map(element).collect()
}

/// The list in its parsable form; `None` if it is empty.
pub(crate) fn print<'c, N: ToString>(elements: impl Iterator<Item = (N, &'c [u32])>) -> Option<String> {
    let element = |(number, cpus): (N, &[u32])| {
        let cpus: Vec<_> = cpus.iter().map(u32::to_string).collect();
        format!("{}@[{}]", number.to_string(), cpus.join(","))
    };
    let elements: Vec<_> = elements.map(element).collect();
    (!elements.is_empty()).then(|| format!("[{}]", elements.join(",")))
}
