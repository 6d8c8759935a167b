package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

type box struct {
	name string
	rx   uint64
	n    uint64
	on   bool
	wait time.Duration
	tags []string
}

var boxFields = []Field[box]{
	F("name", "Name", "of it", func(b box) any { return b.name }),
	F("rx", "RX", "read", func(b box) any { return Bytes(b.rx) }),
	F("sect", "Sectors", "read", func(b box) any { return Sectors(b.rx / 512) }),
	F("count", "Count", "things", func(b box) any { return Count(b.n) }),
	F("on", "On", "runs", func(b box) any { return b.on }),
	F("wait", "Wait", "time", func(b box) any { return b.wait }),
	F("tags", "Tags", "words", func(b box) any { return b.tags }),
	F("none", "None", "nothing", func(box) any { return nil }),
}

var usual = []string{"name", "rx"}

func names(fields []Field[box]) string {
	var s []string
	for _, f := range fields {
		s = append(s, f.Name)
	}
	return strings.Join(s, ",")
}

func TestFieldsAreSelected(t *testing.T) {
	for spec, want := range map[string]string{
		"":                "name,rx",
		",":               "name,rx",
		"rx":              "rx",
		"count,name":      "count,name",
		"+count":          "name,rx,count",
		"+count,on":       "name,rx,count,on",
		"-rx":             "name",
		"-name,rx +count": "count",
		"+count,-name":    "rx,count",
		"all":             "name,rx,sect,count,on,wait,tags,none",
		"all,-none":       "name,rx,sect,count,on,wait,tags",
		"+all":            "name,rx,sect,count,on,wait,tags,none",
		",count,+on":      "count,on",
		"rx,rx":           "rx",
		"+rx":             "name,rx",
	} {
		got, err := Select(boxFields, usual, spec)
		if err != nil || names(got) != want {
			t.Errorf("%q selects %s, want %s (%v)", spec, names(got), want, err)
		}
	}
	for spec, want := range map[string]string{
		"cuont":     `"cuont"; did you mean "count"?`,
		"+nam":      `"nam"; did you mean "name"?`,
		"-all":      "no field is left",
		"-name,rx":  "no field is left",
		"+":         `no field ""`,
		"frobnicat": `no field "frobnicat"`,
		"\x00\xff":  "no field",
	} {
		if _, err := Select(boxFields, usual, spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, want %s", spec, err, want)
		}
	}
}

var boxes = []box{
	{name: "a", rx: 2048, n: 1, on: true, wait: 1500 * time.Microsecond, tags: []string{"x", "y z"}},
	{name: "b \"<&\n\x1b[31m\xff", rx: 3 << 30, n: 2},
}

func everything(t *testing.T) Table {
	t.Helper()
	f, err := Select(boxFields, usual, All)
	if err != nil {
		t.Fatal(err)
	}
	return Build("boxes", "box", f, boxes)
}

func printed(t *testing.T, o Options, table Table) string {
	t.Helper()
	var b bytes.Buffer
	if err := List(&b, o, table); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTablesAlignAndSumUp(t *testing.T) {
	want := "" +
		"Name          RX  Sectors  Count  On    Wait  Tags   None\n" +
		"a             2K       2K      1  yes  1.5ms  x y z  -\n" +
		"b \"<&??[31m?  3G       3G      2  no      0s  -      -\n" +
		"Total         3G       3G      3\n"
	if got := printed(t, Options{}, everything(t)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for _, line := range strings.Split(printed(t, Options{NoHeaders: true, NoTotals: true, Unit: 'K'}, everything(t)), "\n") {
		if strings.HasSuffix(line, " ") || strings.Contains(line, "Total") || strings.Contains(line, "Name") {
			t.Errorf("line %q", line)
		}
	}
	if got := printed(t, Options{Unit: 'K', NoHeaders: true}, everything(t)); !strings.Contains(got, "3145728K") || !strings.Contains(got, " 2K ") {
		t.Errorf("in K:\n%s", got)
	}
}

func TestOneRowHasNoTotals(t *testing.T) {
	table := everything(t)
	table.Rows = table.Rows[:1]
	if got := printed(t, Options{}, table); strings.Contains(got, "Total") {
		t.Errorf("got\n%s", got)
	}
}

func TestWhatBelongsToARowIsATree(t *testing.T) {
	fields, _ := Select(boxFields, usual, "")
	table := Build("boxes", "box", fields, boxes)
	for i := range table.Rows {
		table.Rows[i].Sub = []Table{Build("parts", "part", fields, []box{{name: "p", rx: 1}, {name: "long name", rx: 512}})}
	}
	want := "Name          RX\na             2K\n├─ p            1B\n└─ long name  512B\n" +
		"b \"<&??[31m?  3G\n├─ p            1B\n└─ long name  512B\nTotal         3G\n"
	if got := printed(t, Options{}, table); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := printed(t, Options{NoTree: true}, table); strings.Contains(got, "long") {
		t.Errorf("without the tree:\n%s", got)
	}
	if got := printed(t, Options{Format: "json"}, table); !strings.Contains(got, `"parts": [`) {
		t.Errorf("JSON:\n%s", got)
	}
}

// TestProgramsReadWhatIsPrinted reads each format with somebody else's reader.
func TestProgramsReadWhatIsPrinted(t *testing.T) {
	table := everything(t)
	const second = "b \"<&\n\x1b[31m\uFFFD"
	t.Run("json", func(t *testing.T) {
		var got []map[string]any
		if err := json.Unmarshal([]byte(printed(t, Options{Format: "json"}, table)), &got); err != nil {
			t.Fatal(err)
		}
		a, b := got[0], got[1]
		if a["name"] != "a" || a["rx"] != 2048.0 || a["sect"] != 4.0 || a["count"] != 1.0 || a["on"] != true || a["wait"] != 1.5e6 || a["none"] != nil || b["name"] != second {
			t.Errorf("got %v", got)
		}
		if tags := a["tags"].([]any); len(tags) != 2 || tags[1] != "y z" {
			t.Errorf("tags are %v", tags)
		}
	})
	t.Run("yaml", func(t *testing.T) {
		var got []map[string]any
		if err := yaml.Unmarshal([]byte(printed(t, Options{Format: "yaml"}, table)), &got); err != nil {
			t.Fatal(err)
		}
		if a := got[0]; a["name"] != "a" || a["rx"] != 2048 || a["on"] != true || a["none"] != nil || got[1]["name"] != second {
			t.Errorf("got %v", got)
		}
	})
	t.Run("csv", func(t *testing.T) {
		got, err := csv.NewReader(strings.NewReader(printed(t, Options{Format: "csv", Unit: 'K'}, table))).ReadAll()
		if err != nil || len(got) != 3 {
			t.Fatal(got, err)
		}
		if strings.Join(got[1], "|") != "a|2|2|1|true|1500000|x y z|" || got[0][0] != "name" || got[2][0] != second {
			t.Errorf("got %q", got)
		}
	})
	t.Run("xml", func(t *testing.T) {
		dec := xml.NewDecoder(strings.NewReader(printed(t, Options{Format: "xml"}, table)))
		text := ""
		for {
			tok, err := dec.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if c, ok := tok.(xml.CharData); ok {
				text += string(c)
			}
		}
		if !strings.Contains(text, "b \"<&\n\uFFFD[31m\uFFFD") || !strings.Contains(text, "3221225472") {
			t.Errorf("got %q", text)
		}
	})
}

func TestListsOfNothing(t *testing.T) {
	fields, _ := Select(boxFields, usual, "")
	empty := Build("boxes", "box", fields, nil)
	for format, want := range map[string]string{
		"table": "Name  RX\n", "csv": "name,rx\n", "json": "[]\n", "yaml": "[]\n",
		"xml": xml.Header + "<boxes>\n</boxes>\n",
	} {
		if got := printed(t, Options{Format: format}, empty); got != want {
			t.Errorf("%s: %q, want %q", format, got, want)
		}
	}
}

func TestSizesAreRead(t *testing.T) {
	for _, c := range []struct {
		in   string
		unit byte
		want uint64
		bad  bool
	}{
		{"0", 0, 0, false}, {"512", 0, 512, false}, {"10G", 0, 10 << 30, false}, {"10g", 0, 10 << 30, false}, {"10", 'G', 10 << 30, false},
		{"1B", 0, 1, false}, {"15E", 0, 15 << 60, false}, {"16E", 0, 0, true}, {"10G", 'K', 0, true}, {"", 0, 0, true}, {"G", 0, 0, true},
		{"-1", 0, 0, true}, {"1.5G", 0, 0, true}, {"10GB", 0, 0, true}, {"0x10", 0, 0, true}, {"99999999999999999999", 0, 0, true},
	} {
		got, err := ParseSize(c.in, c.unit)
		if (err != nil) != c.bad || got != c.want {
			t.Errorf("%q in %q is %d, %v", c.in, c.unit, got, err)
		}
	}
}

func TestSizesArePrintedInBinaryUnits(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0B", 1: "1B", 1023: "1023B", 1024: "1K", 1536: "1.5K", 1 << 20: "1M", 10 << 30: "10G", 1 << 40: "1T", 1<<64 - 1: "16E",
	} {
		if got := Human(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
	for unit, want := range map[byte]string{'B': "1536", 'K': "1.5", 'M': "0.001", 'E': "0"} {
		if got := scaled(1536, unit); got != want {
			t.Errorf("1536 in %c is %s, want %s", unit, got, want)
		}
	}
}
