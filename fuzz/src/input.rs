//! An input as a sequence of decisions.

/// The rest of an input. After its end it yields zeros, so every input is valid.
#[derive(Debug, Clone)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// True if all input has been used.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.slice(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// The next `len` bytes, or as many as are left.
    pub fn slice(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// The next 16 bits, little-endian.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

/// Builds a seed that [`Input`] reads back.
#[derive(Debug, Clone, Default)]
pub struct Seed(Vec<u8>);

impl Seed {
    /// An empty seed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `bytes`.
    #[must_use]
    pub fn with(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.extend_from_slice(bytes.as_ref());
        self
    }

    /// The finished seed.
    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_reads_what_a_seed_wrote_and_zeros_after_it() {
        let seed = Seed::new().with([7]).with(0x1234u16.to_le_bytes()).with([1, 2, 3]).done();
        let mut input = Input::new(&seed);
        assert_eq!((input.u8(), input.u16(), input.slice(2)), (7, 0x1234, &[1, 2][..]));
        assert!(!input.is_empty());
        assert_eq!((input.u32(), input.u64()), (3, 0));
        assert!(input.is_empty());
    }
}
