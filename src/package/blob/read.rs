//! Reader of weight files through a memory map.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::{ALIGNMENT, VERSION, padding_bits};
use crate::PackageError;
use anec_base::MappedFile;
use anec_base::Result;
use anec_mil::{Content, Data, DataType, TensorType};

/// Maximum size of a blob that is copied, so that its elements can be inspected like a literal's.
const LITERAL_BYTES: u64 = 64 << 10;

/// Record of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Offset of the record, by which a program refers to the blob.
    pub offset: u64,
    /// Element type.
    pub dtype: DataType,
    /// Size of the data in bytes.
    pub length: u64,
    /// Offset of the data.
    pub data: u64,
    /// Number of unused bits in the last byte.
    pub padding_bits: u64,
}

/// Opened weight file.
pub struct WeightFile {
    path: PathBuf,
    map: Arc<MappedFile>,
    count: u32,
    loaded: Mutex<Loaded>,
}

/// Ranges of a file in use.
#[derive(Default)]
struct Loaded {
    data: HashMap<u64, Data>,
    /// Ends of the ranges of records and data, by their starts.
    ranges: BTreeMap<u64, u64>,
}

impl WeightFile {
    /// Opens a file and checks its header.
    ///
    /// The file is mapped and must not be truncated while it is in use.
    ///
    /// # Errors
    /// Returns an error if the file can't be read or isn't a weight file.
    pub fn open(path: &Path) -> Result<Self, PackageError> {
        let map = MappedFile::open(path).map_err(|e| PackageError::unreadable(path, e.error))?;
        let length = map.bytes().len() as u64;
        let corrupt = |problem: String| PackageError::corrupt(path, problem);
        if length < ALIGNMENT {
            return Err(corrupt(format!("{length} bytes are no weight file; its header alone takes {ALIGNMENT}")));
        }
        let word =
            |at: usize| map.bytes().get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        let (count, version) = (word(0), word(4));
        if version != VERSION {
            return Err(corrupt(format!("weight file of version {version}, expected {VERSION}")));
        }
        let most = length / ALIGNMENT - 1;
        if u64::from(count) > most {
            return Err(corrupt(format!("the header counts {count} blobs, {length} bytes can hold {most}")));
        }
        Ok(WeightFile { path: path.to_owned(), map: Arc::new(map), count, loaded: Mutex::default() })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.map.bytes().len() as u64
    }

    /// Number of blobs in the header.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Returns the record at an offset.
    fn record(&self, offset: u64) -> Result<Record, String> {
        let end = offset.checked_add(ALIGNMENT);
        if offset < ALIGNMENT || !offset.is_multiple_of(ALIGNMENT) {
            return Err(format!("no record can be there; expected a multiple of {ALIGNMENT} beyond the header"));
        }
        match end {
            Some(end) if end <= self.size() => {
                Record::from_bytes(offset, &self.map.bytes()[offset as usize..end as usize], self.size())
            }
            _ => Err(format!("no record can be there; the file has {} bytes", self.size())),
        }
    }

    /// Returns all records, from the first to the last.
    ///
    /// # Errors
    /// Returns an error if a record is damaged, or if their number differs from the header's.
    pub fn records(&self) -> Result<Vec<Record>, PackageError> {
        let corrupt = |problem: String| PackageError::corrupt(&self.path, problem);
        let mut records = Vec::new();
        let mut at = ALIGNMENT;
        while at < self.size() {
            let record = self.record(at).map_err(|problem| corrupt(format!("blob at {at}: {problem}")))?;
            at = (record.data + record.length).next_multiple_of(ALIGNMENT);
            records.push(record);
        }
        if records.len() as u64 != u64::from(self.count) {
            return Err(corrupt(format!("the header counts {} blobs, the file holds {}", self.count, records.len())));
        }
        Ok(records)
    }

    /// Returns the data of a record, which must have type `ty`. Small data is copied; larger data stays in the map and
    /// is read when needed. Equal offsets give the same object.
    ///
    /// # Errors
    /// Returns an error if there is no such record, its type differs, or it overlaps a loaded one.
    pub fn load(&self, offset: u64, ty: &TensorType, owner: &str) -> Result<Data, PackageError> {
        let error = |problem| PackageError::Blob { path: self.path.clone(), offset, owner: owner.to_owned(), problem };
        let record = self.record(offset).map_err(error)?;
        let (Some(elements), Some(length)) = (ty.elements(), ty.bytes()) else {
            return Err(error(format!("{ty} has no fixed size")));
        };
        if record.dtype != ty.dtype {
            return Err(error(format!("it holds {}, expected {ty}", record.dtype)));
        }
        if (record.length, record.padding_bits) != (length, padding_bits(ty.dtype, elements)) {
            return Err(error(format!(
                "it holds {} bytes with {} bits of padding, {ty} takes {length} with {}",
                record.length,
                record.padding_bits,
                padding_bits(ty.dtype, elements)
            )));
        }
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(data) = loaded.data.get(&offset) {
            return Ok(data.clone());
        }
        for range in [(record.offset, record.offset + ALIGNMENT), (record.data, record.data + record.length)] {
            loaded.reserve(range).map_err(error)?;
        }
        if loaded.data.len() as u64 >= u64::from(self.count) {
            return Err(error(format!("the header counts {} blobs, the program refers to more", self.count)));
        }
        let blob = MappedBlob { map: self.map.clone(), at: record.data as usize, length: length as usize };
        let data =
            if length <= LITERAL_BYTES { Data::Literal(blob.bytes().into()) } else { Data::Content(Arc::new(blob)) };
        loaded.data.insert(offset, data.clone());
        Ok(data)
    }
}

impl Loaded {
    /// Marks a range as used; it must not overlap another.
    fn reserve(&mut self, (start, end): (u64, u64)) -> Result<(), String> {
        let before = self.ranges.range(..end).next_back();
        if let Some((other, other_end)) = before
            && *other_end > start
            && start < end
        {
            return Err(format!("bytes {start}..{end} overlap another blob's {other}..{other_end}"));
        }
        if start < end {
            self.ranges.insert(start, end);
        }
        Ok(())
    }
}

impl std::fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightFile").field("path", &self.path).field("size", &self.size()).finish_non_exhaustive()
    }
}

/// Data in the map.
struct MappedBlob {
    map: Arc<MappedFile>,
    at: usize,
    length: usize,
}

impl MappedBlob {
    fn bytes(&self) -> &[u8] {
        &self.map.bytes()[self.at..self.at + self.length]
    }
}

impl Content for MappedBlob {
    fn length(&self) -> u64 {
        self.length as u64
    }

    fn granule(&self) -> u64 {
        1
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match start.checked_add(out.len()).and_then(|end| self.bytes().get(start..end)) {
            Some(bytes) => {
                out.copy_from_slice(bytes);
                // the reader has a copy now, so that the pages needn't count as memory of this process
                self.map.release(self.at + start..self.at + start + bytes.len());
                Ok(())
            }
            None => Err(PackageError::Program {
                problem: format!("{} bytes at {offset} were asked of a constant of {}", out.len(), self.length),
            }
            .into()),
        }
    }
}
