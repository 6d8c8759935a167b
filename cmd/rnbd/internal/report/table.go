package report

// Table is a list of objects of one kind.
type Table struct {
	Name, Item string // as "sessions" and "session"
	Columns    []Info
	Rows       []Row
	Attention  []string // what needs attention, for people: stands above the table
}

// Row is one object. Cells are in the order of the columns.
type Row struct {
	Cells []any
	Sub   []Table  // objects of this one, as the paths of a session
	Notes []string // what needs attention, for people: stands below the row
}

// Build reads the fields of objects.
func Build[T any](name, item string, fields []Field[T], objects []T) Table {
	t := Table{Name: name, Item: item, Columns: Infos(fields)}
	for _, o := range objects {
		r := Row{}
		for _, f := range fields {
			r.Cells = append(r.Cells, f.Get(o))
		}
		t.Rows = append(t.Rows, r)
	}
	return t
}

// totals sums up the columns that can be. ok: there is one, and more than one
// row.
func (t Table) totals() (cells []any, ok bool) {
	cells = make([]any, len(t.Columns))
	for i := range t.Columns {
		for _, r := range t.Rows {
			cells[i] = add(cells[i], r.Cells[i])
		}
		ok = ok || cells[i] != nil
	}
	return cells, ok && len(t.Rows) > 1
}

func add(sum, v any) any {
	switch v := v.(type) {
	case Bytes:
		s, _ := sum.(Bytes)
		return s + v
	case Sectors:
		s, _ := sum.(Sectors)
		return s + v
	case Count:
		s, _ := sum.(Count)
		return s + v
	}
	return sum
}
